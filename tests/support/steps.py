"""Write scheduled modules as text: kernels and hops of round numbers for tests.support.clock."""

from __future__ import annotations

from jaxoverlap.simulation import hlo

HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=16"
X = "%x = f32[1024,1024]{1,0} parameter(0)"
PAIRS, FAR = "{{0,1},{1,0}}", "{{0,8},{8,0}}"


def gemm(name: str) -> str:
    """Return a matmul of one second."""
    return (
        f"%{name} = f32[1024,1024]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, "
        "rhs_contracting_dims={0}"
    )


def copy(name: str, of: str = "m") -> str:
    """Return a copy that takes a second: a megabyte read and written."""
    return f"%{name} = s8[1000000]{{0}} copy(%{of})"


def hop(name: str, seconds: float = 1, pairs: str = PAIRS, *, scale_up: bool = False) -> str:
    size = round(seconds * 1e6)
    domain = "COLLECTIVE_COMMUNICATION_DOMAIN_SCALE_UP_FABRIC"
    own = f', backend_config={{"communication_domain":"{domain}"}}' if scale_up else ""
    return (
        f"%p.{name} = s8[{size}]{{0}} bitcast(%x)\n  %{name} = (s8[{size}]{{0}}, s8[{size}]{{0}}) "
        f"collective-permute-start(%p.{name}), source_target_pairs={pairs}{own}"
    )


def done(name: str) -> str:
    return f"%{name}.done = s8[1]{{0}} collective-permute-done(%{name})"


def sync(name: str, seconds: float = 1) -> str:
    size = round(seconds * 1e6)
    return (
        f"%p.{name} = s8[{size}]{{0}} bitcast(%x)\n  %{name} = s8[{size}]{{0}} "
        f"collective-permute(%p.{name}), source_target_pairs={PAIRS}"
    )


def computation(name: str, *lines: str) -> str:
    body = "\n".join(f"  {line}" for line in (X, "%m = s8[1000000]{0} bitcast(%x)", *lines))
    return f"{name} (x: f32[1024,1024]) -> () {{\n{body}\n  ROOT %end = () tuple()\n}}\n"


CONDITION = computation("%condition", "%t = pred[] constant(true)")


def module(*lines: str, before: str = "") -> hlo.Module:
    return hlo.parse(f"{HEAD}\n\n{CONDITION}\n{before}\n{computation('ENTRY %main', *lines)}")


BODY = computation("%body", hop("r", 2), gemm("a"), done("r"), gemm("b"))
INNER = computation("%inner", gemm("z"))


def loop(trips: int | None, name: str = "loop", body: str = "body") -> str:
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return f"%{name} = () while(%x), condition=%condition, body=%{body}{known}"
