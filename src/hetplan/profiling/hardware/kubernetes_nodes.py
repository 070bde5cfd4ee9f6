"""The nodes of a Kubernetes cluster, from `kubectl get nodes -o json`.

The devices of a node stand in its labels: NVIDIA's and AMD's discovery of features write product,
number and memory, Google's clusters the accelerator's name. What a pod may still be given stands in
`status.allocatable`. Nodes without GPUs, and those that take no pods, are left out, with a line for
each.
"""

import re
from collections.abc import Mapping
from typing import Any

from hetplan.errors import require
from hetplan.files import read_foreign_json
from hetplan.profiling.hardware.hosts import Host, check_number_of_devices, check_number_of_hosts

# Labels with the product of a node's GPUs, and their resources.
PRODUCTS = {
    "nvidia.com/gpu.product": "nvidia.com/gpu",
    "amd.com/gpu.product-name": "amd.com/gpu",
    "beta.amd.com/gpu.product-name": "amd.com/gpu",
    "cloud.google.com/gke-accelerator": "nvidia.com/gpu",
}
RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
# Google's names of accelerators, of which some are no names of products.
OF_GOOGLE = {
    "nvidia-tesla-p4": "P4",
    "nvidia-tesla-t4": "T4",
    "nvidia-tesla-p100": "P100-PCIE-16GB",
    "nvidia-tesla-v100": "V100-SXM2-16GB",
    "nvidia-tesla-a100": "A100-SXM4-40GB",
    "nvidia-a100-80gb": "A100-SXM4-80GB",
    "nvidia-h100-80gb": "H100-SXM5-80GB",
    "nvidia-h100-mega-80gb": "H100-SXM5-80GB",
    "nvidia-h200-141gb": "H200-SXM-141GB",
}
# The resource of slices: so many sevenths of a GPU, with a part of its memory.
SLICES = re.compile(r"nvidia\.com/mig-(?P<sevenths>[1-7])g\.\d+gb.*")
MIB = 2**20


def read_nodes(path: str) -> tuple[list[Host], list[str]]:
    """(the nodes with GPUs, one line for each thing that was left out). Raises InputError."""
    document = read_foreign_json(path)
    expected = "the output of kubectl get nodes -o json"
    kind = document.get("kind") if isinstance(document, dict) else None
    require(kind in ("List", "NodeList", "Node"), "no list of nodes", where=path, expected=expected)
    items = [document] if kind == "Node" else document.get("items")
    require(isinstance(items, list), "no items", where=path, expected=expected)
    check_number_of_hosts(len(items), path)
    hosts: list[Host] = []
    left_out: list[str] = []
    for index, item in enumerate(items):
        name = text_at(item, "metadata", "name")
        require(name, "node without a name", where=f"{path}: items[{index}]", expected=expected)
        why = reason_to_leave_out(item)
        if why is None:
            hosts.append(host_of(item, str(name), f"{path}: {name}"))
        else:
            left_out.append(f"node {name} is left out: {why}")
    require(hosts, "no node with GPUs that takes pods", where=path, got="; ".join(left_out)[:200])
    return hosts, left_out


def reason_to_leave_out(item: Any) -> str | None:
    """Why a node cannot train; None where it can."""
    conditions = value_at(item, "status", "conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        of_readiness = isinstance(condition, dict) and condition.get("type") == "Ready"
        if of_readiness and condition.get("status") != "True":
            return "it is not ready"
    if value_at(item, "spec", "unschedulable") is True:
        return "it takes no pods (cordoned)"
    if product_of(item) is None and not any(allocatable(item, each) for each in RESOURCES):
        if slices_of(item):
            return f"MIG divides its GPUs ({told_slices(item)})"
        return "it has no GPUs"
    if product_of(item) is not None and allocatable(item, resource_of(item)) == 0:
        return f"no {resource_of(item)} can be given to a pod"
    if slices_of(item) and undivided(item) == 0:
        return f"MIG divides all its GPUs ({told_slices(item)})"
    return None


def slices_of(item: Any) -> dict[str, int]:
    """Resource of MIG slices -> how many of it pods may be given, where slices and whole GPUs are
    resources of their own (MIG's strategy `mixed`)."""
    resources = value_at(item, "status", "allocatable")
    names = [str(name) for name in resources] if isinstance(resources, dict) else []
    names = [name for name in names if SLICES.fullmatch(name)]
    counts = {name: allocatable(item, name) or 0 for name in names}
    return {name: count for name, count in counts.items() if count}


def told_slices(item: Any) -> str:
    """The slices of a node, for a line of the answer."""
    return ", ".join(f"{count} {name}" for name, count in slices_of(item).items())


def undivided(item: Any) -> int | None:
    """The number of a node's GPUs that no slices come from; None where the label does not count
    them. nvidia.com/gpu may count divided GPUs, too, which no pod can use whole."""
    labelled = number_at(item, "nvidia.com/gpu.count")
    if labelled is None:
        return None
    matches = [(SLICES.fullmatch(name), count) for name, count in slices_of(item).items()]
    sevenths = sum(int(match["sevenths"]) * count for match, count in matches if match)
    return max(labelled - -(-sevenths // 7), 0)


def host_of(item: Any, name: str, where: str) -> Host:
    """The host of a node with GPUs."""
    free = allocatable(item, resource_of(item))
    labelled = number_at(item, "nvidia.com/gpu.count")
    replicas = number_at(item, "nvidia.com/gpu.replicas") or 1
    number, why = labelled, None
    if labelled is None:
        number = free
        why = f"{resource_of(item)} that can be given to pods"
    # with several replicas, pods share each GPU, and `free` counts their shares
    elif free is not None and replicas <= 1 and free < labelled:
        number = free
        why = f"{resource_of(item)} that can be given to pods, fewer than the label"
    whole = undivided(item)
    if number is not None and slices_of(item):
        number = number if whole is None else min(number, whole)
        why = f"{number} on {name} beside MIG slices, which are left out ({told_slices(item)})"
    if number is not None:
        check_number_of_devices(number, where)
    memory = number_at(item, "nvidia.com/gpu.memory")
    product = product_of(item)
    return Host(
        name,
        number,
        device=OF_GOOGLE.get(product or ""),
        devices_from=why,
        driver_name=product,
        memory_bytes=None if memory is None else float(memory * MIB),
    )


def resource_of(item: Any) -> str:
    """The name of the resource of a node's GPUs."""
    labels = labels_of(item)
    resources = [resource for label, resource in PRODUCTS.items() if label in labels]
    present = [resource for resource in RESOURCES if allocatable(item, resource)]
    return [*resources, *present, RESOURCES[0]][0]


def product_of(item: Any) -> str | None:
    """The product of a node's GPUs as its labels name it; None without such a label."""
    labels = labels_of(item)
    for label in PRODUCTS:
        product = labels.get(label)
        if isinstance(product, str) and product:
            return product
    return None


def allocatable(item: Any, resource: str) -> int | None:
    """The number of units of a resource that pods can get on the node; None where it is not
    stated."""
    text = str(value_at(item, "status", "allocatable", resource))
    # Python refuses to convert thousands of digits; so many devices are refused in any case
    return int(text[:6]) if text.isdecimal() else None


def number_at(item: Any, label: str) -> int | None:
    """The number in a label; None without one."""
    text = str(labels_of(item).get(label))
    # see `allocatable`
    return int(text[:9]) if text.isdecimal() else None


def labels_of(item: Any) -> Mapping[str, Any]:
    """The labels of a node."""
    labels = value_at(item, "metadata", "labels")
    return labels if isinstance(labels, dict) else {}


def text_at(item: Any, *keys: str) -> str | None:
    """The text at some keys; None where there is none."""
    value = value_at(item, *keys)
    return value if isinstance(value, str) and value else None


def value_at(item: Any, *keys: str) -> Any:
    """The value at some keys; None where there is none."""
    for key in keys:
        if not isinstance(item, dict):
            return None
        item = item.get(key)
    return item
