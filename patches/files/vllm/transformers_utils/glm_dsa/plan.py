# SPDX-License-Identifier: Apache-2.0
"""Account for every tensor of a checkpoint and every parameter of the model.

A plan is made from headers, before any weight is read: each tensor is loaded, skipped
for a reason, or a problem.
"""

from dataclasses import dataclass, field

from .config import Model
from .ggml import DEQUANTISABLE, PACKED, PLAIN, TYPES
from .header import Tensor
from .names import ALIASES, EXPERTS, Entry, Shape, Split, groups, skip_reason
from .shards import Checkpoint

DOWNLOAD = (
    "take a file of the same model with types that vLLM's kernels know: Q2_K to Q8_0 "
    "or IQ1_S to IQ4_XS, for instance one named UD-Q4_K_XL, UD-IQ2_XXS or Q8_0"
)


@dataclass(frozen=True)
class Target:
    """What decides, outside the files, whether and how they load.

    Attributes:
        shares_indexers: the model code lets layers reuse another's selection.
        fuses_index_weights: it holds wk and weights_proj in one plain matrix.
        tp: ranks of tensor parallelism.
        copies: of the model, in data parallelism; experts are divided over the ranks
            of all copies together.
        expert_parallel: experts are spread over ranks instead of divided.
    """

    shares_indexers: bool
    fuses_index_weights: bool
    tp: int = 1
    copies: int = 1
    expert_parallel: bool = False


@dataclass(frozen=True)
class Load:
    """One parameter and where it comes from.

    Attributes:
        name: the parameter, in the spelling of the HF checkpoint.
        tensors: one, or k_b and v_b for kv_b_proj.
        packed: the parameter keeps the file's blocks; else it holds numbers.
    """

    name: str
    tensors: tuple[Tensor, ...]
    split: Split
    packed: bool

    def bytes_per_rank(self, tp: int) -> int:
        """What one of `tp` ranks holds, with two bytes for an unpacked number."""
        if self.packed:
            total = sum(tensor.size or 0 for tensor in self.tensors)
        else:
            total = 2 * sum(tensor.elements for tensor in self.tensors)
        return total if self.split is Split.WHOLE else -(-total // tp)


@dataclass
class Problem:
    """One reason not to load the files, and all tensors it holds for."""

    reason: str
    tensors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.tensors:
            return self.reason
        others = len(self.tensors) - 1
        more = f" and {others} more" if others else ""
        return f"{self.tensors[0]}{more}: {self.reason}"


@dataclass(frozen=True)
class Plan:
    """The whole account; no tensor and no parameter is left out.

    Attributes:
        loads: in the order of loading, those with problems too.
        skips: tensor to reason.
        problems: empty if the files can be served.
    """

    loads: tuple[Load, ...]
    skips: dict[str, str]
    problems: tuple[Problem, ...]


def make_plan(checkpoint: Checkpoint, model: Model, target: Target) -> Plan:
    """Account for every tensor of the checkpoint and every parameter of the model."""
    return _Planner(checkpoint, model, target).plan()


class _Planner:
    def __init__(self, checkpoint: Checkpoint, model: Model, target: Target) -> None:
        self.tensors = checkpoint.tensors
        self.model = model
        self.target = target
        self.loads: list[Load] = []
        self.used: set[str] = set()
        self.problems: dict[str, Problem] = {}

    def plan(self) -> Plan:
        self.check_model()
        for prefix, source_prefix, entries in groups(self.model):
            self.load_group(prefix, source_prefix, entries)
        skips = {}
        for name in self.tensors.keys() - self.used:
            reason = skip_reason(self.model, name)
            if reason:
                skips[name] = reason
            else:
                self.problem("no part of this architecture", name)
        for problem in self.problems.values():
            problem.tensors.sort()
        return Plan(
            tuple(self.loads),
            dict(sorted(skips.items())),
            tuple(self.problems.values()),
        )

    def problem(self, reason: str, *tensors: str) -> None:
        entry = self.problems.setdefault(reason, Problem(reason))
        entry.tensors.extend(tensors)

    def check_model(self) -> None:
        model, target = self.model, self.target
        if model.shares_indexers and not target.shares_indexers:
            self.problem(
                "this model shares indexers between layers, as GLM-5.2 does, and the "
                "model code of this vLLM cannot: it would select wrong tokens; use "
                "vLLM 0.21 or later, or GLM-5 or 5.1"
            )
        if target.expert_parallel:
            self.problem(
                "vLLM's GGUF experts cannot be spread over ranks: start it without "
                "--enable-expert-parallel, so that each rank holds a slice of each"
            )
        if model.heads % target.tp:
            self.problem(
                f"{model.heads} heads cannot be divided over {target.tp} ranks"
            )

    def load_group(
        self, prefix: str, source_prefix: str, entries: tuple[Entry, ...]
    ) -> None:
        found = {}
        for entry in entries:
            tensors = []
            for source, shape in zip(
                entry.sources, entry.shapes(self.model), strict=True
            ):
                if tensor := self.find(source_prefix, source):
                    self.check_shape(tensor, shape)
                    tensors.append(tensor)
            found[entry.target] = (entry, tuple(tensors))
        packed = {
            name: self.wants_packed(entry) and all(t.type not in PLAIN for t in tensors)
            for name, (entry, tensors) in found.items()
        }
        self.check_experts(packed, found)
        for name, (entry, sources) in found.items():
            # vLLM holds both halves of a fused matrix in one way.
            halves = packed[name] and packed[entry.partner or name]
            for tensor in sources:
                self.check_type(tensor, halves)
            if len(entry.sources) == 1:
                # kv_b_proj, of two, is divided by heads.
                self.check_division(entry, sources, halves)
            self.loads.append(Load(prefix + name, sources, entry.split, halves))

    def wants_packed(self, entry: Entry) -> bool:
        if entry.target == "self_attn.indexer.wk.weight":
            return not self.target.fuses_index_weights
        return not entry.plain

    def find(self, prefix: str, source: str) -> Tensor | None:
        for spelling in (source, ALIASES.get(source)):
            if spelling and (tensor := self.tensors.get(prefix + spelling)):
                self.used.add(tensor.name)
                return tensor
        self.problem("missing from the files", prefix + source)
        return None

    def check_shape(self, tensor: Tensor, shape: Shape) -> None:
        if tensor.shape != shape:
            self.problem(
                f"has the shape {tensor.shape}, but the metadata ask for {shape}",
                tensor.name,
            )

    def check_type(self, tensor: Tensor, packed: bool) -> None:
        if tensor.type not in (PACKED if packed else DEQUANTISABLE):
            self.problem(
                f"is {tensor.type}, for which vLLM has no kernel; {DOWNLOAD}",
                tensor.name,
            )

    def check_experts(
        self,
        packed: dict[str, bool],
        found: dict[str, tuple[Entry, tuple[Tensor, ...]]],
    ) -> None:
        """vLLM gives all experts of a layer one method, and gate and up one type."""
        experts = {name for name in packed if name.startswith(EXPERTS)}
        if len({packed[name] for name in experts}) == 2:
            self.problem(
                "some experts of this layer are quantised and some are not, which "
                f"vLLM cannot mix; {DOWNLOAD}",
                *(t.name for name in experts for t in found[name][1]),
            )
        pair = [
            tensor
            for name in sorted(experts)
            if "down_proj" not in name and packed[name]
            for tensor in found[name][1]
        ]
        if len({tensor.type for tensor in pair}) == 2:
            self.problem(
                "the gate and up experts of this layer are of two types, "
                f"{pair[0].type} and {pair[1].type}, which vLLM cannot mix; {DOWNLOAD}",
                *(tensor.name for tensor in pair),
            )

    def check_division(
        self, entry: Entry, sources: tuple[Tensor, ...], packed: bool
    ) -> None:
        """Each rank gets whole rows, or whole blocks of each row."""
        (shape,) = entry.shapes(self.model)
        ranks = self.target.tp
        if entry.target.startswith(EXPERTS):
            ranks *= self.target.copies
        for tensor in sources:
            known = TYPES.get(tensor.type_id)
            block = known.block if known and packed else 1
            size, what = {
                Split.ROWS: (shape[-2:][0], "rows"),
                Split.COLUMNS: (shape[-1] // block, f"blocks of {block} inputs"),
            }.get(entry.split, (0, ""))
            if size % ranks:
                self.problem(
                    f"{size} {what} cannot be divided over {ranks} ranks", tensor.name
                )


def plain_modules(plan: Plan) -> list[str]:
    """The modules whose weights are numbers, not packed blocks, as vLLM names them.

    The experts of a layer are one module.
    """
    names = {
        load.name.removesuffix(".weight").partition(".experts.0.")[0]
        + (".experts" if ".experts.0." in load.name else "")
        for load in plan.loads
        if not load.packed and load.name.endswith(".weight")
    }
    return sorted(names)


def bytes_per_rank(plan: Plan, tp: int) -> int:
    """Bytes of weights on one of `tp` ranks."""
    return sum(load.bytes_per_rank(tp) for load in plan.loads)
