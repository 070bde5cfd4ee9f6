"""The links inside a node, from the output of `nvidia-smi topo -m`.

The matrix has one row and one column per GPU. `NV4` are four NVLinks between two GPUs; the other
words say which bridges a transfer over PCIe crosses: one switch (PIX), several (PXB), a processor's
host bridge (PHB), a processor's own fabric (NODE), or the link between processors (SYS).

A cluster file has one rate between any two devices of a node. The slowest pair of devices sets it.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from hetplan.errors import InputError, require
from hetplan.files import read_foreign_text
from hetplan.profiling.hardware.hosts import check_number_of_devices

NVLINKS = re.compile(r"NV(\d{1,3})")
# What a transfer over PCIe crosses, the nearest first, with older words for the same.
PCIE = {
    "PIX": "one PCIe switch",
    "PSB": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a processor's host bridge",
    "NODE": "the host bridges of a processor",
    "SYS": "the link between processors",
    "SOC": "the link between processors",
}
UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")

# By prefix of the device's name: Gbit/s of one NVLink in one direction (architecture whitepapers:
# P100 20 GB/s, V100 to H200 25 GB/s, Blackwell 50 GB/s; GA102 14.06 GB/s, TU102 25 GB/s).
NVLINK_GBIT: Mapping[str, float] = {
    "P100-SXM": 160,
    "V100": 200,
    "A100": 200,
    "A800": 200,
    "A30": 200,
    "H100": 200,
    "H800": 200,
    "H200": 200,
    "H20": 200,
    "GH200": 200,
    "B200": 400,
    "B300": 400,
    "GB200": 400,
    "GB300": 400,
    "Titan-RTX": 200,
    "RTX-2080": 200,
    "Quadro-RTX": 200,
    "RTX-3090": 112.5,
    "A40": 112.5,
    "A4500": 112.5,
    "A5": 112.5,
    "A6000": 112.5,
}
# By prefix: Gbit/s over a card's PCIe lanes in one direction, less a fifth for protocol. Sixteen
# lanes have 128 Gbit/s in generation 3, twice and four times as many in 4 and 5; the least cards
# have eight lanes.
PCIE_GBIT: Mapping[str, float] = {
    **dict.fromkeys(("P4", "P100", "V100", "T4", "RTX-20", "Quadro-RTX", "Titan-RTX"), 100.0),
    **dict.fromkeys(("H100", "H800", "H200", "H20", "B200", "B300", "RTX-PRO"), 400.0),
    **dict.fromkeys(("A2", "RTX-4060"), 100.0),
    "RTX-5060": 200.0,
    "RTX-50": 400.0,
}
PLAIN_PCIE_GBIT = 200.0  # sixteen lanes of generation 4


@dataclass(frozen=True)
class Topology:
    """The links between the GPUs of one node."""

    gpus: int
    links: Mapping[tuple[int, int], str]  # (i, j) with i < j -> word of the matrix
    where: str  # the file, for messages

    def fabric(self, device: str) -> tuple[float | None, str]:
        """(Gbit/s between the two GPUs with the slowest link, a sentence that says what they follow
        from). device: type of the GPUs. Raises InputError for NVLinks of a type whose links are not
        known."""
        if self.gpus == 1:
            return None, f"{self.where} has one GPU"
        counts = Counter(self.links.values())
        words = ", ".join(f"{word} of {count}" for word, count in sorted(counts.items()))
        nvlinks = [int(match[1]) for match in map(NVLINKS.fullmatch, counts) if match]
        if len(nvlinks) == len(counts):
            gbit = self.nvlink_gbit(device) * min(nvlinks)
            return gbit, f"by the NVLinks in {self.where} (pairs: {words})"
        crossed = [PCIE[word] for word in PCIE if word in counts][-1]
        gbit = _by_prefix(PCIE_GBIT, device) or PLAIN_PCIE_GBIT
        return gbit, (
            f"of PCIe through {crossed}, the slowest pair in {self.where} (pairs: {words}), not "
            "measured"
        )

    def nvlink_gbit(self, device: str) -> float:
        """Gbit/s of one NVLink; raises InputError where the device's are not known."""
        gbit = _by_prefix(NVLINK_GBIT, device)
        if gbit is None:
            raise InputError(
                "the rate of this device's NVLinks is not known",
                where=self.where,
                got=device,
                expected="--intra GBIT",
            )
        return gbit


def _by_prefix(table: Mapping[str, float], device: str) -> float | None:
    """The value of the longest prefix of the device's name; None without one."""
    prefixes = [prefix for prefix in table if device.startswith(prefix)]
    return table[max(prefixes, key=len)] if prefixes else None


def read_topology(path: str) -> Topology:
    """The links in a file, as of `topology_of`."""
    return topology_of(read_foreign_text(path), path)


def topology_of(output: str, path: str) -> Topology:
    """The links that the output of `nvidia-smi topo -m` shows. Columns and rows of network cards
    and of processors are passed over. Raises InputError with the line.

    path: the file or the command that the output is of, for messages.
    """
    text = UNDERLINE.sub("", output)
    columns: list[str] = []
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        where = f"{path}: line {number}"
        if not columns:
            columns = [word for word in words if re.fullmatch(r"GPU\d{1,3}", word)]
            is_header = columns and words[: len(columns)] == columns
            if not is_header:
                columns = []
            continue
        if not words or words[0] not in columns or words[0] in rows:
            continue
        links = words[1 : len(columns) + 1]
        for link in links:
            known = link == "X" or link in PCIE or NVLINKS.fullmatch(link)
            expected = f"X, NV#, {', '.join(PCIE)}"
            require(known, "unknown link", where=where, got=link, expected=expected)
        whole = len(links) == len(columns) and links[len(rows)] == "X"
        require(whole, "not a row of the matrix", where=where, got=line.strip())
        rows[words[0]] = links
    require(columns, "no matrix", where=path, expected="the output of nvidia-smi topo -m")
    check_number_of_devices(len(columns), path)
    missing = [name for name in columns if name not in rows]
    require(not missing, "rows are missing", where=path, got=", ".join(missing))
    links_of_pairs = {}
    for i, j in combinations(range(len(columns)), 2):
        there, back = rows[columns[i]][j], rows[columns[j]][i]
        pair = f"{columns[i]} and {columns[j]}"
        require(
            there == back and there != "X", f"{pair} differ", where=path, got=f"{there}, {back}"
        )
        links_of_pairs[i, j] = there
    return Topology(len(columns), links_of_pairs, path)
