"""dlattn and cuDNN's frontend: graphs in one vocabulary, therefore one adapter."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.peers.base import Peer, Prepared
from bench.peers.pages import Pages
from bench.presets import BACKWARD, FORWARD, PASSES, Case
from bench.reference import OUTPUTS, Tensors


class GraphPeer(Peer):
    """A ``pygraph`` of the module ``module``: dlattn and cuDNN's frontend share the words."""

    module: str

    def prepare(self, case: Case, tensors: Tensors, direction: str) -> Prepared:
        import torch

        api = importlib.import_module(self.module)
        dtype = {"bf16": api.data_type.BFLOAT16, "fp16": api.data_type.HALF}[case.dtype]
        handle = self.make_handle(api)
        graph = api.pygraph(
            io_data_type=dtype,
            intermediate_data_type=api.data_type.FLOAT,
            compute_data_type=api.data_type.FLOAT,
            **({} if handle is None else {"handle": handle}),
        )
        fed = {"q": tensors.q, "k": tensors.k, "v": tensors.v}
        if direction == BACKWARD:
            fed |= {"o": tensors.o, "dO": tensors.dO}
        fed = {role: t.transpose(1, 2) for role, t in fed.items()}
        if direction == BACKWARD:
            fed["stats"] = tensors.stats.unsqueeze(-1)
        if tensors.lengths is not None:
            fed["seq_len_q"] = fed["seq_len_kv"] = tensors.lengths.view(-1, 1, 1, 1)
        pages = None if case.page is None else Pages(case, tensors.q.device)
        if pages is not None:
            fed |= {role: pages.container(fed[role]) for role in ("k", "v")}
            fed |= dict.fromkeys(pages.TABLES, pages.table)
        given = {role: graph.tensor_like(t) for role, t in fed.items()}
        arguments = {**given, **mask_arguments(api, case), "attn_scale": case.scale}
        made = {role: torch.empty_like(tensors.like(role)) for role in OUTPUTS[direction]}
        written = {role: t.transpose(1, 2) for role, t in made.items()}
        if pages is not None:
            gradients = written.keys() & {"dK", "dV"}
            written |= {role: pages.container(written[role]) for role in gradients}
        if direction == FORWARD:
            written["stats"] = torch.empty_like(tensors.stats).unsqueeze(-1)
            results = graph.sdpa(**arguments, generate_stats=True)
        else:
            fixed = {"use_deterministic_algorithm": True} if case.deterministic else {}
            results = graph.sdpa_backward(**arguments, **fixed)
        pack = {given[role]: t for role, t in fed.items()}
        for result, (role, t) in zip(results, written.items(), strict=True):
            result.set_output(True).set_dim(list(t.shape)).set_stride(list(t.stride()))
            result.set_data_type(api.data_type.FLOAT if role == "stats" else dtype)
            t.fill_(float("nan"))
            pack[result] = t
        with self.building(direction):
            graph.build([api.heur_mode.A])
        size = max(1, graph.get_workspace_size())
        workspace = torch.empty(size, device=tensors.q.device, dtype=torch.uint8)
        options = {} if handle is None else {"handle": handle}

        def call() -> None:
            graph.execute(pack, workspace, **options)

        def outputs(_: Any) -> tuple[torch.Tensor, ...]:
            if pages is None:
                return tuple(made.values())
            return tuple(
                pages.rows(written[role]) if role in ("dK", "dV") else t for role, t in made.items()
            )

        return Prepared(call, outputs, self.describe(graph))

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


class Cudnn(GraphPeer):
    """cuDNN by its Python frontend."""

    name = module = "cudnn"
    takes_pages = (FORWARD,)
    modules = ("torch", "cudnn")

    def make_handle(self, api: Any) -> Any:
        import torch

        if not hasattr(self, "_handle"):  # one for the process: making one takes 0.1 s
            self._handle = api.create_handle()
        api.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        return self._handle
