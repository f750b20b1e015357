"""A model by its shape: nothing of it is stored or downloaded."""

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import schema
from lockstep.config.reading import load_yaml
from lockstep.errors import BadInput, brief

# The class of transformers that trains each task; a configuration's own architecture names its task otherwise.
CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "language-modelling": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
}
# Models whose first position is the padding token's number plus one, so that their longest text is that much shorter.
AFTER_PADDING = ("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm")
AFTER_PADDING += ("mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
MISSPELT = 0.85  # difflib's ratio from which on an unknown key of a config.json is taken for a misspelt one


@dataclass(frozen=True)
class Model:
    """config: the content of a config.json of transformers; length: tokens of a sample, if it is a text.

    dropout: for every dropout layer; None keeps the configuration's own. ignored: the numbers in a config.json that
    such a model does not have, by their keys.
    """

    config: dict
    length: int
    dropout: float | None = None
    ignored: tuple[str, ...] = ()

    @property
    def remark(self) -> str:
        """A remark on the numbers that are ignored; empty if there are none."""
        if not self.ignored:
            return ""
        return f"Not counted, as a {self.config['model_type']} has no such keys: {', '.join(self.ignored)}."


def read(path: Path, task: str, length: int, image_size: int | None = None) -> Model:
    """The model that a file describes, for samples of `length` tokens, or images of `image_size` pixels each way.

    path: a folder with a config.json of transformers, such a file, or one in YAML with the same keys, of which
    model_type is needed and the others have transformers' defaults. Raises BadInput.
    """
    from transformers import AutoConfig

    if task not in CLASSES:
        raise BadInput(f"task: {task} is not counted. Choose one of {', '.join(CLASSES)}.")
    if not path.exists():
        raise BadInput(f"--model {path}: there is no such file or folder.")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise BadInput(
            f"--model {path}: has no config.json of transformers. Name one, its folder, or a YAML file with its keys; a"
            " model of your own is not counted."
        )
    yaml = file.suffix in (".yaml", ".yml")
    keys = {name: _number(value) for name, value in load_yaml(file).items()} if yaml else _read_json(file)
    if not isinstance(keys, dict) or "model_type" not in keys:
        raise BadInput(f"--model {file}: has no key model_type. Write one, as in model_type: llama.")
    _refuse_unknown_kind(keys["model_type"], file)
    try:
        config = AutoConfig.for_model(**_in_fp32(keys))
        ignored = _ignored(keys, config, file, yaml)
    except BadInput:
        raise
    except Exception as error:  # a configuration may raise anything
        raise BadInput(f"--model {file}: transformers does not take it: {brief(error)}") from None
    most = getattr(config, "max_position_embeddings", None)
    if most and config.model_type in AFTER_PADDING:
        most -= (config.pad_token_id or 0) + 1
    if task != "image-classification" and most and length > most:
        raise BadInput(
            f"--length {length}: the model takes texts of at most {most} tokens. Lower it, or raise"
            f" max_position_embeddings in {file.name}."
        )
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and shared and heads % shared:
        raise BadInput(
            f"--model {file}: {heads} heads can't share {shared} for keys and values evenly. Give num_key_value_heads a"
            f" number that divides {heads}."
        )
    if "quantization_config" in keys:
        raise BadInput(f"--model {file}: is quantised, which no row trains. Take quantization_config out.")
    if experts := [name for name in config.to_dict() if "expert" in name]:
        raise BadInput(
            f"--model {file}: a mixture of experts ({experts[0]}) is not counted: values decide which compute."
        )
    config.architectures = [_class(config, task, file)]
    _complete(config, task, image_size, file)
    return Model(config.to_dict(), length, ignored=ignored)


def _read_json(file: Path):
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"--model {file}: is not JSON: {brief(error)}. A model in YAML has a name that ends in .yaml."
        ) from None


def _number(value):
    """A value of a YAML file as a number, if it is meant as one: YAML reads 1e-5 as text, since it has no point."""
    if isinstance(value, dict):
        return {name: _number(inner) for name, inner in value.items()}
    return float(value) if isinstance(value, str) and re.fullmatch(r"-?\d+e-?\d+", value, re.ASCII) else value


def _refuse_unknown_kind(kind, file: Path) -> None:
    """Raise BadInput if transformers does not have this model_type."""
    from transformers import CONFIG_MAPPING

    if kind not in list(CONFIG_MAPPING):  # it may be anything, a list too
        hint = schema.hint(kind, list(CONFIG_MAPPING))
        raise BadInput(f"--model {file}: model_type: {kind}: transformers has no such model.{hint}")


def _in_fp32(keys: dict) -> dict:
    """A configuration without the type of its weights, since rows train in fp32, whatever the model was saved in."""
    kept = {name: value for name, value in keys.items() if name not in ("dtype", "torch_dtype")}
    return {name: _in_fp32(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _ignored(keys: dict, config, file: Path, yaml: bool) -> tuple[str, ...]:
    """The numbers that this kind of model does not have, and that transformers ignores, by their keys.

    Raises BadInput if there is such a key in YAML, which somebody has written by hand, or one that seems to be a
    misspelt one in JSON, where other programs leave keys of their own, too.
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(config.model_type)
    known = [*default.to_dict(), *default.attribute_map]
    unknown = [name for name in keys if not hasattr(default, name) and not _is_taken(name, keys)]
    if yaml and unknown:
        hint = schema.hint(unknown[0], known)
        raise BadInput(f"--model {file}: {unknown[0]}: no key of a {config.model_type}.{hint}")
    numbers = [name for name in unknown if type(keys[name]) in (int, float)]
    for name in numbers:
        if meant := difflib.get_close_matches(name, set(known) - set(keys), 1, MISSPELT):
            raise BadInput(
                f"--model {file}: {name}: no key of a {config.model_type}. Did you mean {meant[0]}? Otherwise take it"
                " out."
            )
    return tuple(numbers)


def _is_taken(name: str, keys: dict) -> bool:
    """Whether a configuration takes a key as an argument, as rope_theta, although it has no such attribute."""
    from transformers import AutoConfig

    with_it = AutoConfig.for_model(**keys).to_dict()
    without = AutoConfig.for_model(**{other: value for other, value in keys.items() if other != name}).to_dict()
    return with_it | {name: None} != without | {name: None}


def _complete(config, task: str, image_size: int | None, file: Path) -> None:
    """Set the keys that a row sets or needs, in addition to those of the model's own configuration."""
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # where each decoder of transformers has its own default
    if task == "text-classification" and getattr(config, "pad_token_id", None) is None:
        end = getattr(config, "eos_token_id", None)
        config.pad_token_id = end if isinstance(end, int) else 0  # else it takes no batch of several texts
    if task == "image-classification" and image_size:
        config.image_size = image_size
    elif task == "image-classification" and not hasattr(config, "image_size"):
        raise BadInput(f"--model {file}: takes images of any size. Say which: --set data.image_size=224")


def _class(config, task: str, file: Path) -> str:
    import transformers

    known = getattr(transformers, CLASSES[task])._model_mapping
    if type(config) not in known:
        raise BadInput(f"--model {file}: transformers has no {config.model_type} for {task}.")
    cls = known[type(config)]
    return (cls[0] if isinstance(cls, tuple) else cls).__name__
