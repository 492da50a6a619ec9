"""From a configuration to the text of its model, by the reader of its family."""

import re
from collections.abc import Collection, Iterable, Mapping

from stagec.importers.family import ModelFamily, known_families
from stagec.importers.reading.config import Config, Ignored
from stagec.importers.reading.dropout import dropout_rates
from stagec.importers.reading.json_text import JsonText, Object
from stagec.importers.writing.text import ModelText
from stagec.support.diagnostics import Diagnostic, error
from stagec.support.source import Source
from stagec.support.suggest import did_you_mean

#: Files that are often given in place of config.json, by keys that only they have.
_OTHER_FILES: Mapping[str, str] = {
    "added_tokens_decoder": "a tokenizer's configuration",
    "added_tokens": "a tokenizer",
    "chat_template": "a tokenizer's configuration",
    "tokenizer_class": "a tokenizer's configuration",
    "weight_map": "an index of weights",
    "image_processor_type": "a configuration of an image processor",
    "feature_extractor_type": "a configuration of a feature extractor",
    "do_sample": "a configuration of generation",
    "max_new_tokens": "a configuration of generation",
    "_from_model_config": "a configuration of generation",
    "base_model_name_or_path": "a configuration of an adapter",
    "speculators_model_type": "a draft model of speculators",
    "pooling_mode_cls_token": "a part of a sentence-transformers model",
    "pretrained_config": "a configuration of an engine of TensorRT-LLM",
    "mapping": "a configuration of a checkpoint of TensorRT-LLM",
    "quantization": "a configuration of quantization",
    "ssm_cfg": "a configuration of mamba_ssm",
    "dim": "the sizes of a release's own code, such as params.json",
    "initial_context_length": "the sizes of a release's own code",
    "train_batch_size": "a configuration of a training run",
}

#: Model types that are not read, and what of them is not modeled.
NOT_MODELED: Mapping[str, str] = {
    "glm5_next": "an indexer of pooled keys, and layers of delta nets on residual streams",
    "mistral_large4": "layers that take the latent keys of earlier ones",
    "hy_v4": "residual streams that each layer reads and writes, but does not mix",
    "qwen4_exp": "residual streams, and tables of n-grams",
    "blt": "patches of bytes that a model of their entropy forms",
}


def import_model(
    source: Source,
    families: Iterable[ModelFamily],
    ignored: Collection[str] = (),
    *,
    images: bool = False,
    remarks: list[Diagnostic] | None = None,
) -> ModelText:
    """The text of a configuration file; with `images`, that of a step with images. Keys in
    `ignored` are treated as absent; with a list of `remarks` so are unknown keys, each of which
    adds a remark.

    Raises `DiagnosticError` for files that are no configurations, unknown families, invalid values,
    and unknown keys that may change the computation.
    """
    text = JsonText(source)
    members = text.read()
    config = Config(text, members, ignored=Ignored(ignored, remarks))
    known = known_families(families)
    family = _family_of(config, text, members, known)
    read = family.read_images if images else family.read
    if read is None:
        others = dict.fromkeys(f.name for f in known.values() if f.read_images)
        raise error(
            f"{family.name} has no model of images with text",
            config.place("model_type"),
            remedy=f"drop --images, or import one of {', '.join(others)}",
        )
    config.family = family.name
    model = read(config)
    config.finish()
    model.dropout = dropout_rates(config, members, config.text("model_type", default=""))
    return model


def _family_of(
    config: Config, text: JsonText, members: Object, known: Mapping[str, ModelFamily]
) -> ModelFamily:
    key = "model_type" if "model_type" in members or "_class_name" not in members else "_class_name"
    if key not in members:
        other = next((what for k, what in _OTHER_FILES.items() if k in members), None)
        hint = f"; it looks like {other}" if other else ""
        base = members.get("base_model_name_or_path")
        raise error(
            f"{config.file} has no key 'model_type'{hint}",
            text.place(0),
            remedy=f"give the config.json of {base.value!r:.90}, and --lora with its target_modules"
            if base and isinstance(base.value, str)
            else _named_by_class(config, known) or "give the config.json of a model",
        )
    name = config.text(key, default="")
    if key == "_class_name" and name.endswith("Pipeline"):
        has_transformer = "transformer" in config.members
        raise error(
            f"{config.file} is an index of a pipeline of diffusers, {name!r:.60}",
            config.place(key),
            remedy="give the config.json in its folder 'transformer'"
            if has_transformer
            else "it has no transformer, and no other denoiser is read",
        )
    if name not in known and name in NOT_MODELED:
        raise error(
            f"the model type {name!r} is not modeled: it has {NOT_MODELED[name]}",
            config.place(key),
            remedy="write a text of your own with blocks of the library, or a plug-in that reads "
            "it: docs/models.md, 'Add a family'",
        )
    if name not in known:
        if not name:
            raise config.wrong(key, "the type of a model", _named_by_class(config, known))
        others = "docs/reference/families.md lists those that are read; a plug-in may add others"
        raise error(
            f"unknown model type {name!r:.60}",
            config.place(key),
            remedy=did_you_mean(name, known) or others,
        )
    return known[name]


def _named_by_class(config: Config, known: Collection[str]) -> str | None:
    """A remedy that names the model type of the class in `architectures`, if it is read."""
    names = config.strings("architectures") if config.is_list("architectures") else ()
    stem = re.split(r"For[A-Z]|Model|LMHead", names[0])[0].lower() if names else ""
    types = (name for name in known if name.replace("_", "").replace("-", "") == stem)
    first = next(types, None)
    return None if first is None else f'add the key: "model_type": "{first}"'
