"""Plans: what fits, in which units, and what is refused."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import streambp_fx
from benchmarks.families.configs import build
from streambp_fx import PlanError
from streambp_fx.cli import main
from streambp_fx.commands import published
from streambp_fx.cost import eager_step
from streambp_fx.measure.live_bytes import peak_live_bytes
from streambp_fx.plan import Planner, known_models, model_on_meta
from streambp_fx.units import parse_bytes

SIZES = {"vocab_size": 900, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(**SIZES, **HEADS, max_position_embeddings=1 << 17).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def planner(folder: Path) -> Planner:
    return Planner(model_on_meta(folder))


@pytest.mark.slow
def test_the_longest_sequence_fits_and_the_next_does_not(planner: Planner) -> None:
    found = planner.plan("tiny", memory="64MiB", optimizer="adamw")
    assert found.max_seq_len == found.seq_len and found.fits
    budget = 64 * 2**20 - found.weights_bytes - found.gradients_bytes - found.optimizer_bytes
    assert planner.activation_peak(found.seq_len, found.chunk) <= budget
    assert planner.activation_peak(found.seq_len + 1, found.chunk) > budget
    assert found.peak_bytes <= 64 * 2**20
    assert (
        found.optimizer_bytes
        == 2 * found.gradients_bytes
        == 2 * sum(p.numel() * 2 for p in model_on_meta_parameters(planner))
    )
    assert found.eager_seq_len < found.checkpointing_seq_len < found.max_seq_len  # type: ignore[operator]
    assert not planner.plan("tiny", found.seq_len + 1000, "64MiB", optimizer="adamw").fits


def model_on_meta_parameters(planner: Planner) -> list[torch.Tensor]:
    facts = planner.cost.facts
    return [n.meta["val"] for n in facts.parameters]


def test_parts_add_up_and_more_memory_buys_what_it_says(planner: Planner) -> None:
    found = planner.plan("tiny", memory="1GiB")
    resident = found.weights_bytes + found.gradients_bytes + found.optimizer_bytes
    assert found.peak_bytes == resident + found.activation_peak_bytes
    assert sum(found.by_cause.values()) == found.activation_peak_bytes
    more = planner.plan("tiny", memory="2GiB").seq_len - found.seq_len
    assert more == pytest.approx(found.tokens_per_gib, rel=0.02)
    assert 1 <= found.recompute_factor < 2


@pytest.mark.slow
def test_the_model_may_be_given_itself(folder: Path) -> None:
    model = model_on_meta(folder)
    found = streambp_fx.plan(model, seq_len=1000)
    assert found.max_seq_len is None and found.fits and found.seq_len == 1000
    assert not model.forward.__name__.startswith("stream"), "the model is left as it was"


@pytest.mark.slow
def test_adapters_have_gradients_and_the_rest_has_none(folder: Path) -> None:
    pytest.importorskip("peft")
    found = streambp_fx.plan(folder, seq_len=1000, lora_rank=4, optimizer="adamw")
    assert 0 < found.gradients_bytes < found.weights_bytes / 4
    assert found.optimizer_bytes == 2 * found.gradients_bytes


def test_configs_by_name() -> None:
    # as published; those of DeepSeek-V3 without its 14,848 biases of the routing, which are buffers,
    # and those of Qwen3-Next without the layer that looks ahead
    counts = {
        "Qwen/Qwen2.5-1.5B": 1_543_714_304,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "Llama-3.1-8B": 8_030_261_248,
        "Qwen/Qwen3-30B-A3B": 30_532_122_624,
        "openai/gpt-oss-20b": 20_914_757_184,
        "gpt-oss-120b": 116_829_156_672,
        "Qwen3-Next-80B-A3B": 79_674_391_296,
        "DeepSeek-V3": 671_026_404_352,
        "mamba2-2.7b": 2_702_599_680,
    }
    others = {"Qwen3-4B", "Qwen3-14B", "Qwen3-32B"}
    assert set(known_models()) == {n.split("/")[-1] for n in counts} | others
    for name, count in counts.items():
        assert sum(p.numel() for p in model_on_meta(name).parameters()) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["mamba2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("granitemoe", "gpt_oss", "qwen3_next"))],
)
def test_a_model_on_the_meta_device_is_planned_as_it_is_on_the_cpu(family: str) -> None:
    """Its code chooses ops by the device of its tensors."""
    with torch.device("meta"):
        placeless = build(family)
    given: dict[str, Any] = {"seq_len": 200, "batch_size": 2, "chunk": 32}
    found, want = streambp_fx.explain(placeless, **given), streambp_fx.explain(build(family), **given)
    assert all(p.is_meta for p in placeless.parameters())
    assert found.cost.peak_expression() == want.cost.peak_expression()
    assert found.cost.flops_expression() == want.cost.flops_expression()
    assert [s.chunked for s in found.segments] == [s.chunked for s in want.segments]


@pytest.mark.parametrize(
    ("text", "count"), [("80GiB", 80 * 2**30), ("24 GB", 24 * 10**9), ("1.5kib", 1536), (512, 512)]
)
def test_amounts_of_memory(text: Any, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["80Gigs", "GiB", "-3GB", "0GiB", "", True])
def test_amounts_that_are_none(text: Any) -> None:
    with pytest.raises(ValueError, match="no amount of memory"):
        parse_bytes(text)
    with pytest.raises(ValueError, match="no amount of memory"):
        streambp_fx.Options(memory=text)


@pytest.mark.slow
def test_json_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", str(folder), "--seq-len", "3000", "--chunk", "512", "--dtype", "float32"]
    assert main([*argv, "--memory", "20GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {
        "fits", "seq_len", "max_seq_len", "chunk", "policy", "weights_bytes", "gradients_bytes", "flops",
        "optimizer_bytes", "activation_peak_bytes", "peak_bytes", "by_cause", "recompute_factor",
    }  # fmt: skip
    assert wanted <= set(found)
    assert found["fits"] and (found["seq_len"], found["chunk"]) == (3000, 512)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["Nobody-7B", "--memory", "8GiB"], ["Nobody-7B", "Qwen3-8B"]),
        (["{folder}", "--memory", "8 apples"], ["8 apples", "GiB"]),
        (["{folder}"], ["sequence length"]),
        ([], ["which MODEL?", "--published"]),
        (["{folder}", "--published", "--memory", "8GiB"], ["leave out model, memory"]),
        (["{folder}", "--memory", "8GiB", "--dtype", "int3"], ["int3", "bfloat16"]),
        (["{folder}", "--memory", "8GiB", "--optimizer", "adam9"], ["adam9", "adamw"]),
        pytest.param(
            ["{folder}", "--memory", "100KiB"], ["too little", "smallest that works"], marks=pytest.mark.slow
        ),
        (["{folder}", "--memory", "3MiB"], ["one chunk", "smallest that works"]),
        (["{not_causal}", "--memory", "8GiB"], ["is not a causal language model"]),
    ],
)
def test_bad_input(
    argv: list[str], words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    places = {"folder": folder, "not_causal": tmp_path}
    given = [a.format(**places) for a in argv]
    assert main(["plan", *given]) == 2
    captured = capsys.readouterr()
    progress = "streambp-fx: planning"  # on a machine that is busy
    said = "\n".join(line for line in captured.err.splitlines() if not line.startswith(progress))
    assert captured.out == "" and said.startswith("streambp-fx plan: error: ")
    assert all(w in said for w in words), said
    assert "Traceback" not in captured.err and len(captured.err) < 2000


@pytest.mark.slow
def test_published_lengths_beside_a_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a small model in the place of those that were published, which take minutes."""
    pytest.importorskip("peft")
    models = tuple(published.PublishedLengths(str(folder), rank, 11_000, 22_000, 33) for rank in (None, 4))
    monkeypatch.setattr(published, "PUBLISHED", models)
    assert main(["plan", "--published", "--json"]) == 0
    full, adapters = json.loads(capsys.readouterr().out)
    assert full["predicted"]["memory_bytes"] == 80 * 10**9
    assert adapters["predicted"]["gradients_bytes"] < full["predicted"]["gradients_bytes"]
    assert adapters["published"]["lora_rank"] == 4
    assert main(["plan", "--published"]) == 0
    printed = capsys.readouterr().out
    assert f"{full['predicted']['checkpointing_seq_len'] / 1000:,.0f} | 22" in printed
    assert "| 0.033" in printed and "LoRA 4" in printed


@pytest.mark.slow
@pytest.mark.parametrize("each", published.PUBLISHED, ids=lambda p: p.model)
def test_published_lengths_are_predicted(each: published.PublishedLengths) -> None:
    """Within a third, without and with checkpointing; streamed, at least what was published."""
    pytest.importorskip("peft")
    found = published.predicted(streambp_fx.plan(each.model, memory="80GB", lora_rank=each.lora_rank))
    assert found[:2] == pytest.approx(each.tokens[:2], rel=1 / 3)
    assert found[2] >= each.streamed


def test_bad_sizes_in_python(folder: Path) -> None:
    for wrong in ({"seq_len": 1}, {"seq_len": 64, "chunk": 0}, {"seq_len": 64, "batch_size": True}):
        with pytest.raises(PlanError, match="must be an int"):
            streambp_fx.plan(folder, **wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="a name or a path, not a LlamaConfig"):
        streambp_fx.plan(LlamaConfig(), seq_len=64)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="rank"):
        pytest.importorskip("peft")
        streambp_fx.plan(folder, 64, lora_rank=0)


@pytest.mark.slow
def test_what_memory_buys(folder: Path) -> None:
    """As much is saved as fits; more memory is less work, and ours is below the unstreamed step's."""
    given: dict[str, Any] = {"dtype": "float32", "chunk": 256}
    inputs = streambp_fx.plan(folder, 2000, **given)
    memory = int(1.3 * inputs.peak_bytes)
    found = streambp_fx.plan(folder, 2000, memory, **given, policy="auto")
    assert found.fits and inputs.peak_bytes < found.peak_bytes <= memory and found.flops < inputs.flops
    assert found.ways is not None
    ours, others = ([w for w in found.ways if w.streamed is streamed] for streamed in (True, False))
    assert ours[0].peak_bytes == inputs.peak_bytes and ours[0].flops == inputs.flops
    assert [w.peak_bytes for w in ours] == sorted(w.peak_bytes for w in ours)
    assert [w.flops for w in ours] == sorted((w.flops for w in ours), reverse=True)
    checkpointed, eager = others
    assert eager.recompute_factor == 1 < checkpointed.recompute_factor and len(ours) > 4
    for way in ours:
        assert (
            way.recompute_factor < checkpointed.recompute_factor or way.peak_bytes < checkpointed.peak_bytes
        )


@pytest.mark.slow
def test_the_frontier_in_seconds_and_as_a_picture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the least memory and of no recompute the seconds are those of a plan; both ends are in the table."""
    pytest.importorskip("matplotlib")
    found = streambp_fx.plan(folder, 2000, chunk=512, gpu="A100", frontier=True)
    assert found.ways is not None and found.time is not None
    ours = [w for w in found.ways if w.streamed]
    seconds = [w.seconds or 0 for w in ours]
    assert seconds[0] == pytest.approx(found.time.seconds) and ours[0].peak_bytes == found.peak_bytes
    assert seconds == sorted(seconds, reverse=True) and 0 < seconds[-1] < seconds[0]
    assert [w.recompute_factor for w in found.ways][-1] == 1
    with pytest.raises(PlanError, match="for one device"):
        streambp_fx.plan(folder, 2000, gpus=2, shard="ddp", frontier=True)

    asked: dict[str, Any] = {}

    def planned(*_: Any, **given: Any) -> streambp_fx.Plan:
        asked.update(given)
        return found

    monkeypatch.setattr(sys.modules["streambp_fx.plan"], "plan", planned)
    picture = tmp_path / "frontier.svg"
    argv = ["plan", str(folder), "--seq-len", "2000", "--frontier"]
    assert main([*argv, str(picture)]) == 0 and asked["frontier"]
    text = capsys.readouterr().out
    assert "what memory buys" in text and "s a step, predicted" in text and "layers checkpointed" in text
    drawn = picture.read_text()
    assert drawn.startswith("<?xml") and "seconds a step" in drawn
    assert main([*argv, str(tmp_path / "frontier.txt")]) != 0
    assert "must end in .png" in capsys.readouterr().err
    assert main(argv[:-1]) == 0 and not asked["frontier"]


@pytest.mark.slow
def test_policies_in_a_plan(tmp_path: Path) -> None:
    """More is kept: less work, shorter sequences. Less, or elsewhere: the other way round."""
    LlamaConfig(**{**SIZES, "num_hidden_layers": 6}, **HEADS).save_pretrained(tmp_path)
    folder = tmp_path
    given: dict[str, Any] = {"memory": "64MiB", "dtype": "float32", "chunk": 512}
    policies: dict[str, dict[str, Any]] = {
        "attention": {"save": "attention"},
        "inputs": {},
        "host": {"offload": "host"},
        "auto": {"policy": "auto"},
    }
    plans = {name: streambp_fx.plan(folder, **given, **policy) for name, policy in policies.items()}
    lengths = {name: p.max_seq_len or 0 for name, p in plans.items()}
    assert lengths["attention"] < lengths["inputs"] < lengths["host"]
    assert lengths["auto"] >= lengths["inputs"]
    longer = streambp_fx.plan(folder, lengths["inputs"], **given, save="attention")
    assert longer.flops < plans["inputs"].flops and not longer.fits
    assert plans["host"].offloaded_bytes > 0 == plans["inputs"].offloaded_bytes
    assert plans["host"].policy == "store inputs, in host memory"
    fitting = streambp_fx.plan(folder, lengths["attention"], **given, policy="auto")
    # steps of a frontier are taken whole: another choice may be better by a little
    assert fitting.fits and "spare" in fitting.policy and fitting.flops < 1.001 * plans["attention"].flops
    with pytest.raises(PlanError, match="for an amount of memory"):
        streambp_fx.plan(folder, 100, policy="auto")


@pytest.mark.slow
def test_a_plan_chooses_as_a_step_does_where_little_fits() -> None:
    """Also chunks of few rows, and chunks first."""
    shape = {**SIZES, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**{**HEADS, **shape}))
    resident = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    ids = torch.randint(0, model.config.vocab_size, (1, 1500))
    few = set()
    for mebibytes in (2, 3, 6):
        found = streambp_fx.plan(model, 1500, resident + mebibytes * 2**20, policy="auto")
        memory = f"{mebibytes}MiB"
        streamed = streambp_fx.transform(copy.deepcopy(model), memory=memory, check="never")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", streambp_fx.StreamBPWarning)  # too little for one of them
            streamed(input_ids=ids, labels=ids)
        options = streambp_fx.schedule(streamed).options
        chosen = str(options.stored).split(" that spare")[0]
        if "spare" in found.policy:  # the rest is filled up: a step tries shorter chunks for that as well
            assert found.fits and options.rows <= found.chunk
        else:
            assert (found.policy, found.chunk) == (chosen, options.rows)
        few.add(found.chunk)
    assert min(few) < 512 <= max(few)


@pytest.mark.slow
def test_checkpointing_of_a_large_model_on_fake_tensors() -> None:
    """Hugging Face's own step of Qwen3-8B at 20k tokens, counted without memory: what `plan` says of it.

    77 GB were measured on a GPU (arXiv 2506.03077, figure 1): 71.7 GiB.
    """
    config = AutoConfig.from_pretrained(str(resources.files("streambp_fx") / "configs" / "Qwen3-8B.json"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        resident = sum(2 * p.nbytes for p in model.parameters())
        model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = torch.zeros(1, 20_000, dtype=torch.long)
        known = [t for p in model.parameters() for t in (p, p.grad) if t is not None]

        def step() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        live = peak_live_bytes(step, [*known, ids])
    assert resident / 2**30 == pytest.approx(30.5, abs=0.05)
    assert (resident + live) / 2**30 == pytest.approx(71, abs=1)
    cost = Planner(model_on_meta("Qwen3-8B")).cost
    moments = eager_step.timeline(cost, cost.sizes(20_000), checkpointing=True)
    assert max(m.total for m in moments) == pytest.approx(live, rel=0.08)
