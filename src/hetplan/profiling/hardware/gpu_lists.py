"""The GPUs of hosts, as `nvidia-smi -L`, `nvidia-smi --query-gpu=... --format=csv` and `nvidia-smi`
alone print them.

A query may have any columns in any order. Its header names them; without a header (`noheader`) a
cell is the name if it begins with a brand or is a name of the catalogue, and the largest number of
MiB is the memory, because used and free memory are less than the total.

A GPU that is divided into slices (MIG) is no device of its type any more. The slices of a host that
has no undivided GPU are its devices; no type of the catalogue has their names. Of other hosts the
divided GPUs are left out.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetplan.errors import one_line, require
from hetplan.files import read_foreign_text
from hetplan.profiling.hardware.driver_names import TOLERANCE, catalogued, is_known
from hetplan.profiling.hardware.hosts import Host, check_number_of_devices, check_number_of_hosts
from hetplan.profiling.hardware.labelled_output import lines_of_hosts

MIB = 2**20
EXPECTED = (
    "the output of nvidia-smi -L, or of nvidia-smi --query-gpu=name,memory.total --format=csv"
)
LISTED = re.compile(r"GPU (?P<index>\d{1,3}): (?P<name>.+?)(?: \(UUID: [^()]*\))?")
SLICE = re.compile(r"MIG (?P<profile>\S+)\s+Device\s+\d+:.*")
BRAND = re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce|TITAN|GRID) .+", re.IGNORECASE)
SIZE = re.compile(r"(?P<number>\d{1,9})(?: MiB)?")
COLUMN = re.compile(r"(?P<name>[a-z][a-z0-9_.]*)(?: \[[A-Za-z/%]+\])?")
NAMES = ("name", "gpu_name")
TOTAL_MEMORY = "memory.total"
MIG_MODE = "mig.mode.current"
# Lines of the box that `nvidia-smi` alone prints.
OF_THE_BOX = re.compile(r"\| NVIDIA-SMI .*")
ROW_OF_BOX = re.compile(r"\|\s+\d{1,3}\s+(?P<name>[A-Za-z].*?)\s+(?:On|Off|N/A)\s*\|.*")
MEMORY_OF_BOX = re.compile(r"\|.*\|\s*\d+MiB\s*/\s*(?P<total>\d{1,9})MiB\s*\|.*")
DIVIDED_IN_BOX = re.compile(r"\|\s*\|\s*\|\s*Enabled\*?\s*\|")
PROCESSES_OF_BOX = re.compile(r"\| Processes:")
SLICES_OF_BOX = re.compile(r"\| MIG devices:")


@dataclass(frozen=True)
class Gpu:
    """One GPU of a host."""

    name: str  # the driver's
    memory_bytes: float | None
    slices: tuple[str, ...] = ()  # profiles of its MIG slices, such as "3g.40gb"
    divided: bool = False  # whether MIG is on; a query does not tell the slices


@dataclass
class GpuList:
    """The output of a host: its GPUs, and the lines without a GPU."""

    gpus: list[Gpu] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def read_gpu_lists(paths: Sequence[Path]) -> tuple[list[Host], list[str]]:
    """(the hosts with GPUs, one line for each host without and for lines that were passed over). A
    host that no line of a file names has the file's name. Raises InputError."""
    hosts: dict[str, Host] = {}
    told: list[str] = []
    for path in paths:
        text = read_foreign_text(path)
        of_hosts = lines_of_hosts(text, is_content)
        unnamed = of_hosts.pop("", [])
        if unnamed and gpu_list(unnamed, str(path)).gpus:
            of_hosts[path.stem] = unnamed
            unnamed = []
        told += passed_over(str(path), list(filter(None, unnamed)))
        for name, lines in of_hosts.items():
            where = f"{path}: {name}"
            found = gpu_list(lines, where)
            require(name not in hosts, "host stands twice", where=where, got=name)
            if found.gpus:
                hosts[name] = host_with(name, found.gpus, where)
                told += passed_over(name, found.others)
            else:
                said = one_line(found.others[0])[:100] if found.others else "nothing"
                told.append(f"{name} is left out: it shows no GPU, and says {said}")
            check_number_of_hosts(len(hosts), str(path))
    why = f": {'; '.join(told)[:200]}" if told else ""
    require(hosts, f"no GPU{why}", where=", ".join(map(str, paths)), expected=EXPECTED)
    return list(hosts.values()), told


def passed_over(name: str, lines: Sequence[str]) -> list[str]:
    """A line that tells of lines without a GPU; none where there are none."""
    if not lines:
        return []
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return [f"{name}: passed over: {one_line(lines[0])[:100]}{more}"]


def gpu_list(lines: Iterable[str], where: str | None = None) -> GpuList:
    """The GPUs of a host. Raises InputError for two lists of one host, for a query without names,
    and for a box whose names are cut."""
    lines = list(lines)
    if any(OF_THE_BOX.fullmatch(line.strip()) for line in lines):
        return GpuList(gpus_of_box(lines, where))
    found = GpuList()
    columns: list[str] | None = None
    indices: set[str] = set()
    queried = 0
    for line in filter(None, map(str.strip, lines)):
        listed, of_slice = LISTED.fullmatch(line), SLICE.fullmatch(line)
        cells = [cell.strip() for cell in line.split(",")]
        if listed:
            require(listed["index"] not in indices, "GPU stands twice", where=where, got=line)
            indices.add(listed["index"])
            found.gpus.append(Gpu(listed["name"], None))
        elif of_slice and found.gpus:
            last = found.gpus[-1]
            slices = (*last.slices, of_slice["profile"])
            found.gpus[-1] = replace(last, slices=slices, divided=True)
        elif is_header(cells):
            require(columns is None, "two queries of one host", where=where, got=line)
            columns = [match["name"] for match in map(COLUMN.fullmatch, cells) if match]
            has_name = any(name in columns for name in NAMES)
            require(has_name, "a query without the column name", where=where, got=line)
        else:
            gpu = gpu_of_row(cells, columns)
            queried += gpu is not None
            if gpu is None:
                found.others.append(line)
            else:
                found.gpus.append(gpu)
    require(not (indices and queried), "two lists of one host's GPUs", where=where)
    return found


def gpus_of_box(lines: Iterable[str], where: str | None) -> list[Gpu]:
    """The GPUs in the box that `nvidia-smi` prints without options: a row with number and name,
    the next one with the memory, and one that says whether MIG divides the GPU. Older drivers cut
    long names, which then end in dots; such a box raises InputError."""
    gpus: list[Gpu] = []
    for line in map(str.strip, lines):
        named, sized = ROW_OF_BOX.fullmatch(line), MEMORY_OF_BOX.fullmatch(line)
        if named:
            cut = named["name"].endswith("...")
            require(
                not cut, "nvidia-smi's table cuts names", where=where, got=line, expected=EXPECTED
            )
            gpus.append(Gpu(named["name"], None))
        elif sized and gpus:
            gpus[-1] = replace(gpus[-1], memory_bytes=float(sized["total"]) * MIB)
        elif DIVIDED_IN_BOX.fullmatch(line) and gpus:
            gpus[-1] = replace(gpus[-1], divided=True)
        elif PROCESSES_OF_BOX.match(line) or SLICES_OF_BOX.match(line):
            break
    require(gpus, "nvidia-smi's table has no GPU", where=where, expected=EXPECTED)
    return gpus


def is_content(line: str) -> bool:
    """Whether a line is a header, a GPU or a slice."""
    cells = [cell.strip() for cell in line.split(",")]
    whole = LISTED.fullmatch(line) or SLICE.fullmatch(line) or is_header(cells)
    return bool(whole) or any(map(is_name, cells))


def is_header(cells: Sequence[str]) -> bool:
    """Whether the cells are names of columns. One word alone is one only if it is the name's."""
    all_columns = all(map(COLUMN.fullmatch, cells))
    return all_columns and (len(cells) > 1 or cells[0] in NAMES) and not any(map(is_name, cells))


def is_name(cell: str) -> bool:
    """Whether a cell of a query is a GPU's name."""
    return bool(BRAND.fullmatch(cell)) or is_known(cell)


def gpu_of_row(cells: Sequence[str], columns: Sequence[str] | None) -> Gpu | None:
    """The GPU of a row of a query; None for a row that is none. columns: None without a header."""
    if columns is not None:
        if len(cells) != len(columns):
            return None
        values = dict(zip(columns, cells, strict=True))
        name = values.get("name") or values.get("gpu_name") or ""
        sizes = sizes_in([values.get(TOTAL_MEMORY, "")])
        divided = values.get(MIG_MODE) == "Enabled"
    else:
        names = [cell for cell in cells if is_name(cell)]
        name = names[0] if len(names) == 1 else ""
        sizes = sizes_in(cells)
        divided = False
    if not name or name.startswith("["):  # [Unknown Error]
        return None
    return Gpu(name, max(sizes) * MIB if sizes else None, divided=divided)


def sizes_in(cells: Iterable[str]) -> list[float]:
    """The numbers of MiB among the cells, positive ones."""
    matches = [match for match in map(SIZE.fullmatch, cells) if match]
    return [size for match in matches if (size := float(match["number"])) > 0]


def host_with(name: str, gpus: Sequence[Gpu], where: str | None = None) -> Host:
    """The host with these GPUs. Raises InputError where all are divided and the slices are not
    known."""
    whole = [(index, gpu) for index, gpu in enumerate(gpus) if not gpu.divided]
    if whole:
        host = host_of_types(name, whole, where)
        if len(whole) == len(gpus):
            return host
        divided = len(gpus) - len(whole)
        why = f"{len(whole)} on {name}, where MIG divides {divided} other(s)"
        return replace(host, devices_from=why)
    slices = [Gpu(f"{gpu.name} MIG {each}", None) for gpu in gpus for each in gpu.slices]
    require(
        slices,
        "MIG divides all GPUs, and the slices are not told",
        where=where,
        expected="the output of nvidia-smi -L",
    )
    return host_of_types(name, list(enumerate(slices)), where)


def host_of_types(name: str, gpus: Sequence[tuple[int, Gpu]], where: str | None) -> Host:
    """The host with these devices, each with its number. GPUs of several types are its parts."""
    types: list[list[tuple[int, Gpu]]] = []
    for index, gpu in gpus:
        same = next((found for found in types if is_same_type(found[0][1], gpu)), None)
        if same is None:
            types.append([(index, gpu)])
        else:
            same.append((index, gpu))
    parts = tuple(host_of_type(name, [gpu for _, gpu in found], where) for found in types)
    if len(parts) == 1:
        return parts[0]
    numbers = ",".join(str(index) for found in types for index, _ in found)
    # nvidia-smi counts GPUs by their bus, CUDA by default the fastest first
    order = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={numbers}"
    return Host(name, parts=parts, order=order)


def is_same_type(one: Gpu, other: Gpu) -> bool:
    """Whether two GPUs are of one type: two of a type may report sizes that differ by some MiB."""
    sizes = [gpu.memory_bytes for gpu in (one, other) if gpu.memory_bytes is not None]
    alike = not sizes or min(sizes) >= (1 - TOLERANCE) * max(sizes)
    return one.name == other.name and alike


def host_of_type(name: str, gpus: Sequence[Gpu], where: str | None) -> Host:
    """The host with these devices of one type."""
    sizes = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    memory = min(sizes) if sizes else None
    driver_name = gpus[0].name
    return Host(
        name,
        check_number_of_devices(len(gpus), where or name),
        catalogued(driver_name, memory) if memory is not None else None,
        driver_name=driver_name,
        memory_bytes=memory,
    )
