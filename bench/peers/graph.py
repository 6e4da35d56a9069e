"""dlattn and cuDNN's frontend: graphs in one vocabulary, therefore one adapter."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.cases import BACKWARD, DROPOUT, EXTRAS, FORWARD, PASSES, SOFTCAP, Case
from bench.peers.base import Peer, Prepared
from bench.peers.packed import Packed
from bench.peers.pages import Pages
from bench.reference import Tensors, outputs_of, random_tensors

if TYPE_CHECKING:
    import torch


class Declared:
    """A graph of one pass, not built yet, and the tensors that it will read and write.

    Args:
        options: of ``pygraph``, beside the types.

    Attributes:
        graph: the graph.
        case, device: what for, and where its tensors lie.
        pack: every tensor by its graph tensor.
    """

    def __init__(
        self, api: Any, case: Case, tensors: Tensors, direction: str, options: dict[str, Any]
    ) -> None:
        import torch

        self._api, self.case, self.device = api, case, tensors.q.device
        self._type = {"bf16": api.data_type.BFLOAT16, "fp16": api.data_type.HALF}[case.dtype]
        self.graph = api.pygraph(
            io_data_type=self._type,
            intermediate_data_type=api.data_type.FLOAT,
            compute_data_type=api.data_type.FLOAT,
            **options,
        )
        self.pack: dict[Any, torch.Tensor] = {}
        self._starts: dict[int, Any] = {}
        self._pages = None if case.page is None else Pages(case, tensors.q.device)
        self._packed = Packed(case, tensors.q.device) if case.extra == "ragged" else None
        read = {"q": tensors.q, "k": tensors.k, "v": tensors.v}
        if direction == BACKWARD:
            read |= {"o": tensors.o, "dO": tensors.dO}
        given = {role: self._read(role, t) for role, t in read.items()}
        if direction == BACKWARD:
            given["stats"] = self.plain(tensors.stats.unsqueeze(-1))
        given |= self._extras(tensors)
        self._made = {
            role: torch.empty_like(tensors.like(role)) for role in outputs_of(case, direction)
        }
        self._written = {role: self._stored(role, t) for role, t in self._made.items()}
        more = {role: self.plain(self._made[role]) for role in list(self._made)[3:]}
        arguments = {**given, **more, **mask_arguments(api, case), "attn_scale": case.scale}
        if direction == FORWARD:
            results = self.graph.sdpa(**arguments, generate_stats=True)
            self._written["stats"] = torch.empty_like(tensors.stats).unsqueeze(-1)
        else:
            fixed = {"use_deterministic_algorithm": True} if case.deterministic else {}
            results = self.graph.sdpa_backward(**arguments, **fixed)
        main = [role for role in self._written if role not in more]
        for result, role in zip(results, main, strict=True):
            self._write(result, role)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """What was written, as tensors of the pass's order, (B, S, H, D)."""
        made = []
        for role, t in self._made.items():
            if self._packed is not None:
                t = self._packed.unpack(self._written[role])
            elif self._pages is not None and role in ("dK", "dV"):
                t = self._pages.rows(self._written[role])
            made.append(t)
        return tuple(made)

    def _stored(self, role: str, t: torch.Tensor) -> torch.Tensor:
        """A (B, S, H, D) tensor as the graph takes its memory."""
        if role in ("dBias", "dSink_token"):
            return t
        if self._packed is not None:
            return self._packed.pack(t)
        t = t.transpose(1, 2)
        is_paged = self._pages is not None and role in ("k", "v", "dK", "dV")
        return self._pages.container(t) if is_paged else t

    def _read(self, role: str, t: torch.Tensor) -> Any:
        stored = self._stored(role, t)
        if self._packed is None:
            return self.plain(stored)
        dim, stride = _padded(t)
        declared = self.graph.tensor(dim=dim, stride=stride, data_type=self._type)
        declared.set_ragged_offset(self._start(t))
        self.pack[declared] = stored
        return declared

    def plain(self, t: torch.Tensor) -> Any:
        """An input that is declared as it lies there."""
        declared = like(self._api, self.graph, t)
        self.pack[declared] = t
        return declared

    def _start(self, t: torch.Tensor) -> Any:
        """Where the entries of a packed tensor begin, in its elements."""
        assert self._packed is not None
        row = t.shape[2] * t.shape[3]
        if row not in self._starts:
            self._starts[row] = self.plain((self._packed.starts * row).view(-1, 1, 1, 1))
        return self._starts[row]

    def _write(self, result: Any, role: str) -> None:
        stored = self._written[role].fill_(float("nan"))
        dim, stride = list(stored.shape), list(stored.stride())
        if self._packed is not None and role != "stats":
            dim, stride = _padded(self._made[role])
            result.set_ragged_offset(self._start(self._made[role]))
        result.set_output(True).set_dim(dim).set_stride(stride)
        result.set_data_type(self._api.data_type.FLOAT if role == "stats" else self._type)
        self.pack[result] = stored

    def _extras(self, tensors: Tensors) -> dict[str, Any]:
        """Arguments of lengths, pages, and whatever the case has beside."""
        case, found = self.case, {}
        if tensors.lengths is not None:
            lengths = self.plain(tensors.lengths.view(-1, 1, 1, 1))
            found |= {"seq_len_q": lengths, "seq_len_kv": lengths}
        if self._pages is not None:
            found |= dict.fromkeys(self._pages.TABLES, self.plain(self._pages.table))
        declared = {name: self.plain(t) for name, t in tensors.extras.items()}
        if case.extra == "dropout":
            found["dropout"] = (DROPOUT, declared["seed"], declared["offset"])
        else:
            found |= declared
        return found | self.edits()

    def edits(self) -> dict[str, Any]:
        """Arguments of a soft cap or of slopes."""
        if self.case.extra == "softcap":
            return {"softcap": SOFTCAP}
        return {"use_alibi_mask": True} if self.case.extra == "alibi" else {}


def like(api: Any, graph: Any, t: torch.Tensor) -> Any:
    """A graph's tensor like a torch tensor, on ``meta`` too, which no DLPack knows."""
    if not t.is_meta:
        return graph.tensor_like(t)
    names = {"bfloat16": "BFLOAT16", "float16": "HALF", "float32": "FLOAT", "int32": "INT32"}
    name = names.get(str(t.dtype).removeprefix("torch."), "INT64")
    data_type = getattr(api.data_type, name)
    return graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=data_type)


def _padded(t: torch.Tensor) -> tuple[list[int], list[int]]:
    """Dimensions and strides of (B, S, H, D) memory as (B, H, S, D)."""
    as_bhsd = t.transpose(1, 2)
    return list(as_bhsd.shape), list(as_bhsd.stride())


class GraphPeer(Peer):
    """A ``pygraph`` of the module ``module``: dlattn and cuDNN's frontend share the words."""

    module: str
    declared: type[Declared] = Declared

    def prepare(self, case: Case, tensors: Tensors, direction: str) -> Prepared:
        import torch

        api = importlib.import_module(self.module)
        handle = self.make_handle(api)
        options = {} if handle is None else {"handle": handle}
        declared = self.declared(api, case, tensors, direction, options)
        graph, pack = declared.graph, declared.pack
        with self.building(direction):
            graph.build([api.heur_mode.A])
        size = max(1, graph.get_workspace_size())
        workspace = torch.empty(size, device=tensors.q.device, dtype=torch.uint8)

        def call() -> None:
            graph.execute(pack, workspace, **options)

        return Prepared(call, lambda _: declared.outputs(), self.describe(graph))

    def make_handle(self, api: Any) -> Any:
        """The library's handle on the current stream, or ``None`` where it needs none."""
        return None

    @contextmanager
    def building(self, direction: str) -> Iterator[None]:
        """Wraps the build."""
        yield

    def describe(self, graph: Any) -> str:
        """What the built graph runs."""
        return ""


def mask_arguments(api: Any, case: Case) -> dict[str, Any]:
    """The mask in the graph vocabulary; for square cases by the shorthand, as most users write."""
    arguments: dict[str, Any] = {}
    if case.lengths is not None:
        arguments["use_padding_mask"] = True
    if case.mask == "causal" and case.seq_q == case.seq_kv:
        arguments["use_causal_mask"] = True
    elif case.mask != "full":
        corner = api.diagonal_alignment
        square = case.seq_q == case.seq_kv
        arguments["diagonal_alignment"] = corner.TOP_LEFT if square else corner.BOTTOM_RIGHT
        arguments["diagonal_band_right_bound"] = 0
        if case.window is not None:
            arguments["diagonal_band_left_bound"] = case.window
    return arguments


class Dlattn(GraphPeer):
    """dlattn's graph API.

    Args:
        engine: a plan (``fwd_sm80``), a family (``sm80``), or ``None`` for what the environment
            (``DLATTN_ENGINE``) or the library chooses.
    """

    module = "dlattn"
    takes_pages = PASSES
    extras = EXTRAS
    modules = ("torch", "cupy")

    def __init__(self, engine: str | None = None) -> None:
        self.engine = engine
        self.name = f"dlattn:{engine}" if engine else "dlattn"

    def refuses(self, case: Case, direction: str) -> str | None:
        other = {FORWARD: "bwd_", BACKWARD: "fwd_"}[direction]
        if self.engine is not None and self.engine.startswith(other):
            return f"{self.name} does not run the {direction} pass."
        return None

    def plan_name(self, direction: str) -> str | None:
        """The value of ``DLATTN_ENGINE`` for a pass."""
        if self.engine is None or self.engine.startswith(("fwd_", "bwd_")):
            return self.engine
        return {FORWARD: "fwd_", BACKWARD: "bwd_"}[direction] + self.engine

    @contextmanager
    def building(self, direction: str) -> Iterator[None]:
        plan, before = self.plan_name(direction), os.environ.get("DLATTN_ENGINE")
        if plan is not None:
            os.environ["DLATTN_ENGINE"] = plan
        try:
            yield
        finally:
            if plan is not None:
                os.environ.pop("DLATTN_ENGINE")
                if before is not None:
                    os.environ["DLATTN_ENGINE"] = before

    def describe(self, graph: Any) -> str:
        return str(graph.get_plan_name_at_index(0))

    def compile(self, case: Case, direction: str, device: Any) -> None:
        """Compiles what a pass launches, into the cache, without tensors.

        Args:
            device: of ``create_device_properties``.
        """
        api = importlib.import_module(self.module)
        options = {"device_property": device}
        declared = self.declared(api, case, random_tensors(case, "meta"), direction, options)
        declared.graph.build([api.heur_mode.A])


class Cudnn(GraphPeer):
    """cuDNN by its Python frontend."""

    name = module = "cudnn"
    takes_pages = (FORWARD,)
    extras = tuple(extra for extra in EXTRAS if extra != "softcap")
    modules = ("torch", "cudnn")

    def make_handle(self, api: Any) -> Any:
        import torch

        if not hasattr(self, "_handle"):  # one for the process: making one takes 0.1 s
            self._handle = api.create_handle()
        api.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        return self._handle
