"""What rows of the sequence read and has no rows itself: towers of pictures, encoders, conditions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from custom_functions import Clipped
from e2e_models import sample
from torch import Tensor, nn

import streambp_fx

WIDTH, VOCAB, LENGTH, CHUNK, PICTURE = 16, 61, 37, 8, 60
STATES = 5


class Tower(nn.Module):
    """Layers over the states of a context, with attention among them."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        parts = {"qkv": 3 * WIDTH, "up": WIDTH}
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(WIDTH, k) for n, k in parts.items()}) for _ in range(layers)
        )

    def forward(self, context: Tensor) -> Tensor:
        x = self.first(context)
        for layer in self.layers:
            q, k, v = layer["qkv"](F.layer_norm(x, (WIDTH,))).unsqueeze(1).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
            x = x + F.gelu(layer["up"](F.layer_norm(x, (WIDTH,))))
        return x


class Reader(nn.Module):
    """A decoder of two layers; `read` puts the context into its rows."""

    def __init__(self, read: Callable[..., Tensor], returns: bool = False, warm: bool = False) -> None:
        super().__init__()
        self.read, self.returns, self.warm = read, returns, warm
        self.embedding, self.tower = nn.Embedding(VOCAB, WIDTH), Tower()
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(WIDTH, k * WIDTH) for n, k in (("qkv", 3), ("kv", 2), ("out", 1))})
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, picture: Tensor, labels: Tensor) -> Any:
        context = self.tower(picture)
        x = self.embedding(input_ids)
        if self.read is placed:
            x = placed(self, x, context, input_ids)
        if self.read is scaled:
            spread, mean = torch.var_mean(context, 1, keepdim=True)
            context = spread.sqrt(), mean.exp()
        for layer in self.layers:
            q, k, v = layer["qkv"](F.layer_norm(x, (WIDTH,))).unsqueeze(1).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
            if self.read is not placed:
                x = x + self.read(layer, F.layer_norm(x, (WIDTH,)), context)
            x = x + F.silu(layer["out"](F.layer_norm(x, (WIDTH,))))
        if self.warm:  # a temperature of the head
            x = x * context.mean(1, keepdim=True).exp()
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return (loss, context) if self.returns else loss


def crossed(layer: Any, x: Tensor, context: Tensor) -> Tensor:
    k, v = layer["kv"](context).unsqueeze(1).chunk(2, -1)
    return F.scaled_dot_product_attention(x.unsqueeze(1), k, v).squeeze(1)


def crossed_by_hand(layer: Any, x: Tensor, context: Tensor) -> Tensor:
    k, v = layer["kv"](context).chunk(2, -1)
    return (x @ k.transpose(1, 2) / 4).softmax(-1) @ v


def added(layer: Any, x: Tensor, context: Tensor) -> Tensor:
    """A condition of the whole sample."""
    return x * layer["kv"](context.mean(1, keepdim=True))[..., :WIDTH]


def placed(model: Reader, x: Tensor, context: Tensor, ids: Tensor) -> Tensor:
    """In the places of a token, as models of pictures have it."""
    return x.masked_scatter((ids == PICTURE).unsqueeze(-1).expand_as(x), context)


def scaled(layer: Any, x: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
    """By two values that are made of the context before any layer."""
    return x * context[0] + context[1]


def clipped(layer: Any, x: Tensor, context: Tensor) -> Tensor:
    """Read through a function whose backward is not linear."""
    return crossed(layer, x, Clipped.apply(context))


def dropped(layer: Any, x: Tensor, context: Tensor) -> Tensor:
    """The same numbers for all rows."""
    return x + F.dropout(layer["kv"](context).mean(1, keepdim=True), 0.5)[..., :WIDTH]


def grouped(layer: Any, x: Tensor, context: Tensor) -> Tensor:
    """Rows where the heads are: which key head a row reads depends on how many rows there are."""
    keys = layer["kv"](context)[..., :WIDTH].unsqueeze(2)[:, :2]
    return F.scaled_dot_product_attention(x.unsqueeze(2), keys, keys, enable_gqa=True).squeeze(2)


def split(layer: Any, x: Tensor, context: Tensor) -> Tensor:
    a, b = layer["kv"](context).chunk(2, -1)
    spread, mean = torch.var_mean(a * b.sigmoid(), 1, keepdim=True)
    return x * mean + spread


def inputs(places: int = STATES, batch: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, PICTURE, (batch, LENGTH))
    ids[:, 3 : 3 + places] = PICTURE
    labels = torch.where(ids == PICTURE, -100, ids)
    return {"input_ids": ids, "picture": torch.randn(batch, STATES, 7).double(), "labels": labels}


def step(model: nn.Module, call: Any, given: dict[str, Tensor]) -> Any:
    model.zero_grad()
    out = call(**given)
    if isinstance(out, tuple):
        (out[0] + (out[1] ** 2).sum()).backward()  # a gradient of what is returned as well
        return out[0]
    out.backward()
    return out


def check(eager: nn.Module, door: str, given: dict[str, Tensor], layers: int = 2) -> Any:
    torch._dynamo.reset()  # it compiles one function a few times only, for whatever models
    model = copy.deepcopy(eager)
    if door == "transform":
        call: Any = streambp_fx.transform(model, chunk=CHUNK)
    else:
        options = {"chunk": CHUNK, "seq_dim": {"input_ids": 1}}  # the attention of the tower is along another
        call = torch.compile(model, backend="streambp", options=options)
    for _ in range(2):
        want, got = step(eager, eager, given), step(model, call, given)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=0)
        for (name, p), q in zip(eager.named_parameters(), model.named_parameters(), strict=True):
            assert (p.grad is None) == (q[1].grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(q[1].grad, p.grad, rtol=1e-8, atol=1e-12, msg=name)
    schedule = streambp_fx.schedule(model)
    assert schedule is not None
    assert all(s.chunked for s in schedule.segments), str(schedule)
    assert sum(s.kind == "layer" for s in schedule.segments) == layers, str(schedule)
    return schedule


READS = [crossed, crossed_by_hand, added, placed]
CASES = [
    (door, read, returns) for door in ("transform", "compile") for read in READS for returns in (False, True)
]
KEPT = [("transform", crossed, True), ("compile", placed, False), ("transform", added, False)]


@pytest.mark.parametrize(("door", "read", "returns"), sample(CASES, *KEPT))
def test_a_context_is_made_once_and_read_by_rows(
    door: str, read: Callable[..., Tensor], returns: bool
) -> None:
    torch.manual_seed(0)
    schedule = check(Reader(read, returns).double().train(), door, inputs())
    tower = [s for s in schedule.segments if s.kind == "unchunked"]
    assert len(tower) >= 4, f"it is computed again layer by layer\n{schedule}"
    assert max(len(s.nodes) for s in tower) < 20, str(schedule)


@pytest.mark.parametrize("door", sample(["transform", "compile"], "transform"))
def test_a_context_of_several_parts_and_one_that_the_head_reads(door: str) -> None:
    torch.manual_seed(0)
    check(Reader(split, warm=True).double().train(), door, inputs())


@pytest.mark.parametrize("checked", sample(["first", "never"], "never"))
@pytest.mark.parametrize("read", [clipped, grouped])
@pytest.mark.filterwarnings("ignore:.*run unchunked:streambp_fx.StreamBPWarning")
def test_what_chunks_may_not_make_anew_makes_its_layer_run_whole(read: Any, checked: str) -> None:
    torch.manual_seed(0)
    eager = Reader(read).double().train()
    model = copy.deepcopy(eager)
    streambp_fx.transform(model, chunk=CHUNK, check=checked)
    given = {n: v[:, :36] if v.shape[1] == LENGTH else v for n, v in inputs().items()}
    torch.testing.assert_close(step(model, model, given), step(eager, eager, given), rtol=1e-10, atol=0)
    assert_same_gradients(eager, model)


@pytest.mark.filterwarnings("ignore:.*run unchunked:streambp_fx.StreamBPWarning")
def test_dropout_of_a_context_is_drawn_once() -> None:
    torch.manual_seed(0)
    model = Reader(dropped).double().train()
    streambp_fx.transform(model, chunk=CHUNK, check="never")
    step(model, model, inputs())
    schedule = streambp_fx.schedule(model)
    assert schedule is not None
    reasons = [str(s.reason) for s in schedule.segments if not s.chunked]
    assert len(reasons) == 2 and all("random numbers are drawn" in r for r in reasons), str(schedule)


@pytest.mark.parametrize("places", [0, STATES - 2])
def test_fewer_places_than_rows(places: int) -> None:
    torch.manual_seed(0)
    check(Reader(placed).double().train(), "transform", inputs(places))


def test_more_places_than_rows_fail_as_eager_does() -> None:
    model = Reader(placed).double().train()
    with pytest.raises(RuntimeError):
        model(**inputs(STATES + 1))
    streambp_fx.transform(model, chunk=CHUNK)
    with pytest.raises((RuntimeError, IndexError)):
        model(**inputs(STATES + 1)).backward()


def assert_same_gradients(eager: nn.Module, model: nn.Module) -> None:
    pairs = [(p.grad, q.grad) for p, q in zip(eager.parameters(), model.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    error = sum(float((a - b).square().sum()) for a, b in pairs if a is not None) ** 0.5
    assert error < 1e-12 * sum(float(a.square().sum()) for a, _ in pairs if a is not None) ** 0.5


def llava() -> Any:
    text = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=4),
        text_config=transformers.LlamaConfig(**text),
        image_token_index=96,
        image_seq_length=16,
        vision_feature_select_strategy="default",
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).double().train()


@pytest.mark.slow
def test_text_with_pictures() -> None:
    """A model of transformers: two pictures in two samples, one of which has padding behind its text."""
    ids = torch.randint(1, 96, (2, 45))
    ids[0, 4:20], ids[1, 9:25], ids[1, 40:] = 96, 96, 0
    mask, labels = (ids != 0).long(), torch.where((ids == 96) | (ids == 0), -100, ids)
    given = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(2, 3, 16, 16).double()}
    eager = llava()
    model = copy.deepcopy(eager)
    streambp_fx.transform(model, chunk=CHUNK)
    for one in (eager, model):
        one(**given, labels=labels, use_cache=False).loss.backward()
    assert_same_gradients(eager, model)
    schedule = streambp_fx.schedule(model)
    assert schedule is not None
    assert [s.kind for s in schedule.segments if s.kind != "unchunked"] == ["layer", "layer", "rows"]
    assert all(s.chunked for s in schedule.segments), str(schedule)


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0,
        max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(config).double().train()


@pytest.mark.parametrize("length", sample([29, 45, LENGTH]))
def test_the_decoder_is_streamed(length: int) -> None:
    """The encoder is read by each row of the decoder; it is shorter, longer, or as long."""
    ids, labels = torch.randint(1, 97, (2, length)), torch.randint(1, 97, (2, LENGTH))
    ids[1, -6:], labels[1, -5:] = 0, -100
    eager = bart()
    model = copy.deepcopy(eager)
    streambp_fx.transform(model, chunk=CHUNK)
    for one in (eager, model):
        one(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss.backward()
    assert_same_gradients(eager, model)
    schedule = streambp_fx.schedule(model)
    assert schedule is not None
    assert all(s.chunked for s in schedule.segments), str(schedule)
    if length != LENGTH:
        assert [s.kind for s in schedule.segments if s.kind != "unchunked"] == ["layer", "layer", "rows"]
        assert len(schedule.segments) == 10, "the encoder is computed again in halves of layers"


@pytest.mark.parametrize("door", sample(["transform", "compile"], "transform"))
def test_rows_begin_behind_a_context_of_which_several_parts_are_read(door: str) -> None:
    """The last piece of the context does not hold an op of the rows: it could not be chunked then."""
    torch.manual_seed(0)
    check(Reader(scaled).double().train(), door, inputs())
