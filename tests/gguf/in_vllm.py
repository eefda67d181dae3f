# SPDX-License-Identifier: Apache-2.0
"""Runs in a vLLM's own environment: load a GGUF file with its real loader, on the CPU.

usage: python in_vllm.py JOBS, where JOBS is a JSON file, a list of:
    model           the GGUF file
    hf_config_path  a folder with a config.json, or null for the file's own
    dtype           of activations
    capability      of the simulated GPU
    tp, ranks       ranks of tensor parallelism, and which of them to load
    expert_parallel as on the command line
    copies          of the model, in data parallelism
    out             a folder: one rank<N>.pt with parameters and their attributes,
                    or an error.json with the type and text of what was raised

"dense" in the results is what each GGUF layer multiplies with: its own `apply`, given
the identity, with gguf's dequantisation in place of the compiled kernel.

Real: the engine's arguments and config, the choice of quantisation and dtype, every
layer's construction, the loader, every weight loader, and what runs after loading.
Not real: compiled kernels (the one of GGUF layers is replaced, the others are not
called), the attention backend (none can
run on a CPU; an empty one stands in), the kernel of unquantised experts (Triton is not
there) and the other ranks (a group of one claims to be one of several; loading does
not communicate).
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import gguf
import torch
import torch._ops


class _Anything(types.ModuleType):
    """A module that has every name; each is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Compiled extensions, and one GPU-only package that releases import early."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        package, _, last = name.rpartition(".")
        compiled = last.endswith(("_C", "_C_stable_libtorch", "cumem_allocator"))
        if package.startswith("vllm") and compiled:
            return importlib.machinery.ModuleSpec(name, self)
        if name.split(".")[0] == "humming":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _AbsentOp:
    """An op of a compiled extension: can be asked what it supports, nothing more."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, part: str) -> "_AbsentOp":
        if part.startswith("__"):
            raise AttributeError(part)
        return _AbsentOp(f"{self.name}.{part}")

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        if "supports" in self.name:
            return False
        raise RuntimeError(f"{self.name} was called, which needs a GPU")


def stand_in_for_compiled_code() -> None:
    sys.meta_path.insert(0, _AbsentModules())
    namespace = torch._ops._OpNamespace
    find = namespace.__getattr__
    register = torch.library.register_fake

    def find_or_stand_in(self: Any, name: str) -> Any:
        try:
            return find(self, name)
        except AttributeError:
            if self.name.startswith("_"):
                return _AbsentOp(f"{self.name}.{name}")
            raise

    def register_present(op: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(op, str) and op.startswith("_"):
            return (lambda function: function) if not args else args[0]
        return register(op, *args, **kwargs)

    namespace.__getattr__ = find_or_stand_in
    torch.library.register_fake = register_present


class _Relay:
    """vLLM's current platform, whatever that is at the moment."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self.platform, name)


def simulate_gpu(major: int, minor: int) -> None:
    """A CUDA platform of the given capability, which keeps tensors on the CPU."""
    import vllm.platforms
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    capability = DeviceCapability(major, minor)

    class Early(Platform):
        _enum = PlatformEnum.CUDA
        device_name = device_type = "cuda"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return capability

    relay = _Relay(Early())
    vllm.platforms._current_platform = relay
    base = importlib.import_module("vllm.platforms.cuda").CudaPlatformBase

    class Simulated(base):
        device_type = "cpu"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return capability

        @classmethod
        def has_device_capability(cls, wanted: Any, device_id: int = 0) -> bool:
            wanted = divmod(wanted, 10) if isinstance(wanted, int) else wanted
            return capability >= tuple(wanted)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "simulated"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 96 << 30

    relay.platform = Simulated()
    torch.cuda.Stream = _Anything("streams").Stream


class _NoAttention:
    """An attention backend, and its implementation, that is never run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "NONE"

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        pass


def stand_in_for_attention() -> None:
    import vllm.model_executor.layers.attention.mla_attention as mla
    import vllm.v1.attention.selector as selector

    for module in (mla, selector):
        module.get_attn_backend = lambda *args, **kwargs: _NoAttention
    mla.get_mla_prefill_backend = lambda config: _NoAttention


def stand_in_for_kernels() -> None:
    import vllm.model_executor.layers.quantization.gguf as quantization
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    quantization.fused_mul_mat_gguf = multiply
    UnquantizedFusedMoEMethod._setup_kernel = lambda *args, **kwargs: None


def engine_config(request: dict) -> Any:
    import vllm.model_executor.models.registry as registry
    from vllm.engine.arg_utils import EngineArgs

    # A subprocess would lack what stands in for compiled code.
    registry._run_in_subprocess = lambda function: function()
    return EngineArgs(
        model=request["model"],
        tokenizer=request["out"],  # never read
        skip_tokenizer_init=True,
        hf_config_path=request["hf_config_path"],
        dtype=request["dtype"],
        max_model_len=64,
        enforce_eager=True,
    ).create_engine_config()


def claim_rank(rank: int, count: int) -> None:
    from vllm.distributed import parallel_state

    for group in (parallel_state._TP, parallel_state._EP):
        if group is not None:
            group.rank_in_group, group.world_size = rank, count


def multiply(x: torch.Tensor, qweight: torch.Tensor, kind: int) -> torch.Tensor:
    """x times the matrix in `qweight`, as vLLM's op of GGUF layers."""
    kind = gguf.GGMLQuantizationType(kind)
    return x @ torch.from_numpy(gguf.quants.dequantize(qweight.numpy(), kind)).T


def dense(module: Any) -> torch.Tensor:
    """The matrix of a GGUF layer, float32 [outputs, inputs] of this rank."""
    inputs = torch.eye(module.qweight.tensor_shape[1])
    return module.quant_method.apply(module, inputs).T.contiguous()


def build(request: dict, rank: int) -> tuple[Any, Any]:
    """The engine's config, and the model of one rank as the real loader fills it."""
    import vllm.distributed.parallel_state as parallel_state
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    config = engine_config(request)
    config.parallel_config.tensor_parallel_size = request["tp"]
    config.parallel_config.enable_expert_parallel = request["expert_parallel"]
    config.parallel_config.data_parallel_size = request["copies"]
    config.device_config.device = torch.device("cpu")
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(
                1, 0, f"file://{request['out']}/rendezvous", 0, "gloo"
            )
            parallel = config.parallel_config
            config.parallel_config = type(parallel)()
            parallel_state.initialize_model_parallel(1, 1)
            config.parallel_config = parallel
        claim_rank(rank, request["tp"])
        loader = get_model_loader(config.load_config)
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
    return config, model


def load(request: dict, rank: int) -> dict:
    """The parameters of one rank, with what the GGUF layers note beside them."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.gguf import GGUFLinearMethod

    config, model = build(request, rank)
    return {
        "hf_config": config.model_config.hf_config.to_dict(),
        "dtype": config.model_config.dtype,
        "parameters": {n: p.data for n, p in model.named_parameters()},
        "types": {
            name: parameter.shard_weight_type or parameter.weight_type
            if hasattr(parameter, "shard_weight_type")
            else parameter.weight_type
            for name, parameter in model.named_parameters()
            if hasattr(parameter, "weight_type")
        },
        "dense": {
            name: dense(module)
            for name, module in model.named_modules()
            if isinstance(module, LinearBase)
            and isinstance(module.quant_method, GGUFLinearMethod)
            and module.qweight.numel()
        },
    }


def run(job: dict) -> None:
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    try:
        for rank in job["ranks"]:
            torch.save(load(job, rank), out / f"rank{rank}.pt")
    except Exception as error:
        text = {"type": type(error).__name__, "text": str(error)}
        (out / "error.json").write_text(json.dumps(text))
        traceback.print_exc()


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    stand_in_for_compiled_code()
    simulate_gpu(*jobs[0]["capability"])
    stand_in_for_attention()
    stand_in_for_kernels()
    for job in jobs:
        run(job)


if __name__ == "__main__":
    main()
