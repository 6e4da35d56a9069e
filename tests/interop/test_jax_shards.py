"""``dlattn.jax`` in ``shard_map``, over two devices that XLA makes of another process's CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

PROGRAM = """
import jax
import numpy as np
from dlattn.jax import attention, dot_product_attention
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
bias = jax.random.normal(jax.random.key(1), (4, 5, 5))
batch, heads, whole = P("d"), P(None, None, "d"), P()


def of_whole(q, k, v, *bias):
    k, v = (jax.numpy.broadcast_to(x, q.shape) for x in (k, v))
    return jax.nn.dot_product_attention(q, k, v, *bias, is_causal=True)


def with_gradients(function, inputs):
    def loss(*given):
        out = function(*given)
        return (out**2).sum(), out

    return jax.grad(loss, argnums=tuple(range(len(inputs))), has_aux=True)(*inputs)


for checked in (True, False):
    for compiled in (False, True):
        for inputs, specs, out in (
            ((q, k, v), (batch,) * 3, batch),
            ((q, k, v), (heads,) * 3, heads),
            ((q, k[:1], v[:1]), (batch, whole, whole), batch),  # whose gradients are sums
            ((q, k, v, bias), (batch, batch, batch, whole), batch),
        ):
            sharded = jax.shard_map(
                lambda *x: dot_product_attention(*x, is_causal=True),
                mesh=mesh, in_specs=specs, out_specs=out, check_vma=checked,
            )
            run = lambda *x: with_gradients(sharded, x)
            found = (jax.jit(run) if compiled else run)(*inputs)
            wanted = with_gradients(of_whole, inputs)
            for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-4)
        in_shards = jax.shard_map(
            jax.vmap(attention), mesh=mesh, in_specs=batch, out_specs=batch, check_vma=checked
        )
        found = (jax.jit(in_shards) if compiled else in_shards)(*(x[:, None] for x in (q, k, v)))
        np.testing.assert_allclose(found[:, 0], attention(q, k, v), atol=1e-5)
"""


def test_shards() -> None:
    """Outputs and gradients are those of the whole, whether the batch or the heads are divided, of
    what every shard has a sum over the shards; compiled or not, also if JAX checks along which axes
    of the mesh arrays differ."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
