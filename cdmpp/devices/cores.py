"""CPU cores by the numbers that they report: name, and fp32 multiply-add lanes per instruction set.

A lane is one multiply-add a cycle. SSE4.2 has no multiply-add: an add beside a multiply on two ports of four
lanes is as much arithmetic as four lanes do. AVX2 with FMA has two ports of eight lanes on all cores but the
small and early ones below; AVX-512 two of sixteen on servers, one (or two halves) on most others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

#: Lanes by instruction set, for cores that are not in the table; AVX-512 does not determine them.
USUAL_LANES: Final = {"sse4.2": 4, "avx2": 16, "neon": 8}
#: Flags (Linux names) that an instruction set needs.
NEEDED_FLAGS: Final = {
    "sse4.2": ("sse4_2",),
    "avx2": ("avx2", "fma"),
    "avx512": ("avx512f", "avx512dq", "avx512bw", "avx512vl"),
    "neon": ("asimd",),
}


@dataclass(frozen=True)
class Core:
    """A microarchitecture.

    Attributes
    ----------
    slug, name : str
        For identifiers, for people.
    lanes : dict of str to int
        Where they differ from :data:`USUAL_LANES`.
    amx : bool
        Whether it has AMX: what a hypervisor reports as the CPU's number need not be true.
    """

    slug: str
    name: str
    lanes: dict[str, int] = field(default_factory=dict)
    amx: bool = False

    def fits(self, flags: frozenset[str]) -> bool:
        """Whether the flags that are reported can be this core's; a hypervisor may hide some, never add."""
        return (self.amx or "amx_tile" not in flags) and ("avx512" in self.lanes or "avx512f" not in flags)


_TWO, _ONE = {"avx512": 32}, {"avx512": 16}
#: Intel, family 6: model number -> core.
_INTEL: Final = {
    **dict.fromkeys((0x3C, 0x45, 0x46), Core("haswell", "Haswell")),
    0x3F: Core("xeon-haswell", "Haswell-EP"),
    **dict.fromkeys((0x3D, 0x47), Core("broadwell", "Broadwell")),
    **dict.fromkeys((0x4F, 0x56), Core("xeon-broadwell", "Broadwell-EP")),
    **dict.fromkeys((0x4E, 0x5E), Core("skylake", "Skylake")),
    **dict.fromkeys((0x8E, 0x9E), Core("kaby-lake", "Kaby Lake or Coffee Lake")),
    **dict.fromkeys((0xA5, 0xA6), Core("comet-lake", "Comet Lake")),
    **dict.fromkeys((0x7D, 0x7E), Core("ice-lake", "Ice Lake", _ONE)),
    **dict.fromkeys((0x8C, 0x8D), Core("tiger-lake", "Tiger Lake", _ONE)),
    0xA7: Core("rocket-lake", "Rocket Lake", _ONE),
    **dict.fromkeys((0x97, 0x9A), Core("alder-lake", "Alder Lake")),
    **dict.fromkeys((0xB7, 0xBA, 0xBF), Core("raptor-lake", "Raptor Lake")),
    **dict.fromkeys((0xAA, 0xAC), Core("meteor-lake", "Meteor Lake")),
    **dict.fromkeys((0x6A, 0x6C), Core("xeon-ice-lake", "Ice Lake-SP", _TWO)),
    0x8F: Core("xeon-sapphire-rapids", "Sapphire Rapids", _TWO, amx=True),
    0xCF: Core("xeon-emerald-rapids", "Emerald Rapids", _TWO, amx=True),
    **dict.fromkeys((0xAD, 0xAE), Core("xeon-granite-rapids", "Granite Rapids", _TWO, amx=True)),
}
#: AMD: (family, first model, last model, core).
_ZEN1: Final = Core("zen", "Zen", {"avx2": 8})
_AMD: Final = (
    (0x17, 0x00, 0x2F, _ZEN1),
    (0x17, 0x30, 0xFF, Core("zen2", "Zen 2")),
    (0x19, 0x00, 0x0F, Core("zen3", "Zen 3")),
    (0x19, 0x10, 0x1F, Core("zen4", "Zen 4", _ONE)),
    (0x19, 0x20, 0x5F, Core("zen3", "Zen 3")),
    (0x19, 0x60, 0xAF, Core("zen4", "Zen 4", _ONE)),
    (0x1A, 0x00, 0x1F, Core("zen5", "Zen 5", _TWO)),
    (0x1A, 0x40, 0x4F, Core("zen5", "Zen 5", _TWO)),
)
#: ARM (implementer 0x41): part number -> core.
_ARM: Final = {
    0xD03: Core("cortex-a53", "Cortex-A53", {"neon": 4}),
    0xD05: Core("cortex-a55", "Cortex-A55", {"neon": 4}),
    0xD08: Core("cortex-a72", "Cortex-A72", {"neon": 4}),
    0xD0B: Core("cortex-a76", "Cortex-A76"),
    0xD0C: Core("neoverse-n1", "Neoverse N1"),
    0xD49: Core("neoverse-n2", "Neoverse N2"),
    0xD40: Core("neoverse-v1", "Neoverse V1", {"neon": 16}),
    0xD4F: Core("neoverse-v2", "Neoverse V2", {"neon": 16}),
}


def find_core(vendor: str, family: int | None, model: int | None, stepping: int | None) -> Core | None:
    """The core of these numbers, if it is one of the known ones; for ARM ``model`` is the part number."""
    if model is None:
        return None
    if vendor == "Intel" and family == 6:
        if model == 0x55:  # three generations under one number
            if (stepping or 0) < 5:
                return Core("xeon-skylake", "Skylake-SP", _TWO)
            return Core("xeon-cascade-lake", "Cascade Lake or Cooper Lake", _TWO)
        return _INTEL.get(model)
    if vendor == "AMD":
        return next((core for f, low, high, core in _AMD if f == family and low <= model <= high), None)
    return _ARM.get(model) if vendor == "ARM" else None
