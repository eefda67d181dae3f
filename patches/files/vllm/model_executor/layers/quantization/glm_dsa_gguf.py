# SPDX-License-Identifier: Apache-2.0
"""How vLLM holds and multiplies the weights of a GLM-5 GGUF file."""

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.gguf import GGUFConfig
from vllm.platforms import current_platform

logger = init_logger(__name__)


class GlmDsaGGUFConfig(GGUFConfig):
    """vLLM's GGUF config, less two limits that leave GLM-5 nothing to run with."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """All three on every GPU.

        vLLM bans bfloat16 from capability 10.0 on for its rounding errors, but there
        its own sparse-attention backends take nothing else.
        """
        if current_platform.has_device_capability(100):
            logger.warning_once(
                "With bfloat16 activations, GGUF kernels round each result to 8 bits "
                "instead of float16's 11; --dtype float16 is closer to the weights."
            )
        return [torch.half, torch.bfloat16, torch.float32]

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        """As for any GGUF file, but experts that the file holds as plain numbers
        stay plain, where vLLM would take them for packed blocks."""
        if isinstance(layer, FusedMoE) and prefix in self.unquantized_modules:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return super().get_quant_method(layer, prefix)
