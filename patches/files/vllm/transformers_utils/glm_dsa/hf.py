# SPDX-License-Identifier: Apache-2.0
"""Give vLLM and transformers a config for GLM-5, out of the GGUF file if need be."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from .config import ARCHITECTURE, MODEL_TYPE, read_model
from .header import GgufError, peek_architecture
from .shards import read_checkpoint, shard_paths

CONFIG_FORMAT = "glm_dsa_gguf"


class GlmMoeDsaConfig(PretrainedConfig):
    """For a transformers older than 5.2, which has no class of this model type."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ("past_key_values",)


def is_glm_dsa_file(model: str | Path) -> bool:
    """Whether `model` is a local GGUF file, or one shard of several, with GLM-5."""
    path = Path(model)
    if path.suffix != ".gguf":
        return False
    try:
        first = shard_paths(path)[0]
    except GgufError:
        return False
    return peek_architecture(first) == ARCHITECTURE


def glm_dsa_config_format(model: str | Path, config_format: str) -> str:
    """The config format to read `model` with, which is `config_format` but for GLM-5.

    Also makes the model type known to a transformers that lacks it.
    """
    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, GlmMoeDsaConfig)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(MODEL_TYPE, "GlmMoeDsaForCausalLM")
    if config_format == "auto" and is_glm_dsa_file(model):
        return CONFIG_FORMAT
    return config_format


class GlmDsaConfigParser(ConfigParserBase):
    """Builds the config from the metadata of the GGUF file."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], PretrainedConfig]:
        """Args:
            model: the folder of the file, as vLLM passes it.
            kwargs: `gguf_file`, the file's name; others are of no use here.

        Raises:
            GgufError: the files are broken, incomplete or contradict themselves.
        """
        checkpoint = read_checkpoint(Path(model) / kwargs["gguf_file"])
        fields = read_model(checkpoint).config()
        return fields, CONFIG_MAPPING[MODEL_TYPE](**fields)
