"""The nodes of a Kubernetes cluster, from `kubectl get nodes -o json`.

The devices of a node stand in its labels: NVIDIA's and AMD's discovery of features write product,
number and memory, Google's clusters the accelerator's name. What a pod may still be given stands in
`status.allocatable`. Nodes without GPUs, and those that take no pods, are left out; each is told.
"""

from collections.abc import Mapping
from typing import Any

from hetplan.errors import require
from hetplan.files import read_json
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
MIB = 2**20


def read_nodes(path: str) -> tuple[list[Host], list[str]]:
    """(the nodes with GPUs, one line for each thing that was left out). Raises InputError."""
    document = read_json(path)
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
        return "it has no GPUs"
    if product_of(item) is not None and allocatable(item, resource_of(item)) == 0:
        return f"no {resource_of(item)} can be given to a pod"
    return None


def host_of(item: Any, name: str, where: str) -> Host:
    """The host of a node with GPUs."""
    free = allocatable(item, resource_of(item))
    labelled = number_at(item, "nvidia.com/gpu.count")
    replicas = number_at(item, "nvidia.com/gpu.replicas") or 1
    number, why = labelled, None
    if labelled is None:
        number = free
        why = f"{resource_of(item)} that can be given to pods"
    elif free is not None and replicas <= 1 and free < labelled:
        number = free
        why = f"{resource_of(item)} that can be given to pods, fewer than the label"
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
    return int(text[:6]) if text.isdecimal() else None


def number_at(item: Any, label: str) -> int | None:
    """The number in a label; None without one."""
    text = str(labels_of(item).get(label))
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
