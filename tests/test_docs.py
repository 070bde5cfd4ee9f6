"""The other documents: links, generated tables, example files, metadata."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hetplan import __version__
from hetplan.formulations import FAMILIES, family
from hetplan.instances.answers import judge, read_claims
from hetplan.instances.library import parse_instance
from hetplan.plans.plan import load_plan
from hetplan.profiling.hardware.cluster import catalogue, load_cluster
from hetplan.profiling.models.zoo import BUILT_IN
from hetplan.profiling.profiles.profile import load_profile
from markdown_pages import PAGES, ROOT, blocks, links

DOCS = ROOT / "docs"
FILES = DOCS / "files.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_sites_navigation() -> None:
    """`mkdocs build --strict` says so, too, and holds anchors as well; this needs no mkdocs."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r": ([\w-]+\.md)\b", text)
    hooks = site_hooks()
    pages = [page.name for page in DOCS.glob("*.md") if not page.name.endswith(".template.md")]
    assert sorted(listed) == sorted(pages + list(hooks.ROOT_PAGES.values()))


def test_the_sites_links_stay_on_the_site() -> None:
    hooks = site_hooks()
    for page in PAGES:
        folder, text = "docs" if page.parent == DOCS else "", page.read_text(encoding="utf-8")
        copied = [f"source/{path}" for path in hooks.outside(text, folder)]
        for target in links(page):
            there = hooks.site_target(target, folder)
            known = [*copied, *hooks.ROOT_PAGES.values()]
            assert (DOCS / there).exists() or there in known, (page.name, target)
    assert hooks.site_target("../README.md#benchmarks", "docs") == "overview.md#benchmarks"
    assert hooks.site_target("docs/files.md", "") == "files.md"
    assert hooks.site_target("../LICENSE", "docs") == "source/LICENSE"
    assert (
        hooks.relinked("```\n[a](b)\n```\n[a](b)\n", lambda _: "c") == "```\n[a](b)\n```\n[a](c)\n"
    )


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_paths_in_backticks_exist(page: Path) -> None:
    """Paths from the root, from the package, of files that the page has its reader write, or
    (method-NAME.md) from that family's folder; `<…>` stands for any name."""
    package = ROOT / "src" / "hetplan"
    bases = [ROOT, package, package / "formulations" / page.stem.removeprefix("method-")]
    names = re.findall(r"`([\w./<>-]+/[\w.<>-]*)`", page.read_text(encoding="utf-8"))
    written = {block.mark.removeprefix("file:") for block in blocks(page)}
    patterns = [re.sub(r"<\w+>", "*", name) for name in names if name not in written]
    assert [p for p in patterns if not any(next(base.glob(p), None) for base in bases)] == []


@pytest.mark.parametrize(
    "script", ["method_tables.py", "name_lists.py", "proofs_table.py", "rule_names.py"]
)
def test_what_is_generated_is_up_to_date(script: str) -> None:
    done = subprocess.run(
        [sys.executable, DOCS / script, "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def site_hooks() -> Any:
    """docs/site_hooks.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


def example(format_name: str) -> Any:
    """The example of a format in files.md, parsed."""
    for block in blocks(FILES):
        value = yaml.safe_load(block.body) if block.language == "yaml" else json.loads(block.body)
        if value.get("format") == format_name or (format_name == "answer" and "results" in value):
            return value
    raise AssertionError(f"no example of {format_name}")


@pytest.mark.parametrize(
    ("format_name", "suffix", "load"),
    [
        ("hetplan-cluster", "yaml", load_cluster),
        ("hetplan-profile", "json", load_profile),
        ("hetplan-plan", "json", load_plan),
    ],
)
def test_example_files_are_valid(format_name: str, suffix: str, load: Any, tmp_path: Path) -> None:
    path = tmp_path / f"example.{suffix}"
    path.write_text(json.dumps(example(format_name)), encoding="utf-8")  # JSON is YAML
    assert load(path).name if format_name != "hetplan-profile" else load(path).model


def test_every_format_is_documented() -> None:
    sources = [
        path.read_text(encoding="utf-8") for path in (ROOT / "src" / "hetplan").rglob("*.py")
    ]
    formats = {
        name for text in sources for name in re.findall(r"\bformat: Literal\[\"([\w-]+)\"\]", text)
    }
    assert {"hetplan-cluster", "hetplan-best-known", "hetplan-devices"} <= formats
    text = FILES.read_text(encoding="utf-8")
    assert sorted(name for name in formats if f"`{name}`" not in text) == []


@pytest.mark.parametrize("kind", ["hetplan-best-known", "answer"])
def test_example_claims_hold(kind: str) -> None:
    instance = parse_instance(example("hetplan-instance"), where="files.md")
    (claim,) = read_claims(example(kind), instance, where="files.md")
    (verdict,) = judge([claim], instance)
    assert verdict.complaints == () and claim.bound == claim.objective


def test_every_key_of_a_profile_and_of_a_cluster_is_documented() -> None:
    text = FILES.read_text(encoding="utf-8")
    from hetplan.plans.plan import Plan, PlanWorkload, Replica, Stage
    from hetplan.profiling.hardware.cluster import DeviceOverride, NodeEntry
    from hetplan.profiling.profiles.profile import ProfileLayer, ProfileTable, Provenance

    profile, plan = (Provenance, ProfileLayer, ProfileTable), (Plan, PlanWorkload, Replica, Stage)
    models = (DeviceOverride, NodeEntry, *profile, *plan)
    keys = {key for model in models for key in model.model_fields}
    assert sorted(key for key in keys if not re.search(rf"\b{key}\b", text)) == []


@pytest.mark.parametrize("problem", list(FAMILIES))
def test_every_key_of_an_instance_is_documented(problem: str) -> None:
    row = re.search(
        rf"^\| `{problem}` \|.*$", FILES.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert row is not None
    for model in (family(problem).load_data(), family(problem).load_decision()):
        schema = model.model_json_schema()
        parts = [schema, *schema.get("$defs", {}).values()]
        keys = {key for part in parts for key in part.get("properties", {})}
        assert sorted(key for key in keys if f"`{key}`" not in row[0]) == []


def pins() -> dict[str, str]:
    """Name -> version that constraints.txt gives this Python; every line must be an exact pin."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    found: dict[str, str] = {}
    for requirement in wanted:
        (exact,) = requirement.specifier
        assert exact.operator == "==" and "*" not in exact.version, requirement
        if applies(requirement):
            assert (
                found.setdefault(canonicalize_name(requirement.name), exact.version)
                == exact.version
            )
    return found


def applies(requirement: Requirement) -> bool:
    """Whether the requirement is for this Python."""
    return requirement.marker is None or requirement.marker.evaluate()


def test_constraints_pin_every_dependency_within_its_range() -> None:
    extras = PROJECT["optional-dependencies"]
    own = [Requirement(text) for text in extras["test"] if text.startswith("hetplan[")]
    inside = [name for requirement in own for name in requirement.extras] + ["docs"]
    assert "runtime" in inside
    texts = [
        *PROJECT["dependencies"],
        *extras["test"],
        *(text for name in inside for text in extras[name]),
    ]
    wanted = [
        requirement for requirement in map(Requirement, texts) if requirement.name != "hetplan"
    ]
    pinned = pins()
    for requirement in filter(applies, wanted):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    assert pinned["torch"] == "2.13.0"


def test_citation_and_changes_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type", "abstract", "license"} <= set(citation)
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in changes


def test_the_page_of_files_lists_every_device_type_and_built_in_model() -> None:
    page = (DOCS / "files.md").read_text()
    missing = [name for name in (*catalogue(), *BUILT_IN) if f"`{name}`" not in page]
    assert missing == []


def test_pages_that_code_names_exist() -> None:
    named = re.compile(r"\b(?:docs|evidence)/[\w/-]+\.(?:md|py)\b")
    folders = ("src", "evidence", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {name for path in files for name in named.findall(path.read_text(encoding="utf-8"))}
    assert "docs/workloads.md" in found
    assert sorted(name for name in found if not (ROOT / name).is_file()) == []


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_commands_of_evidence_that_pages_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    modules = set(re.findall(r"python -m (evidence\.\w+)", text))
    scripts = set(re.findall(r"python -m evidence\.speed ([a-z]\w*)", text))
    names = modules | {f"evidence.speed.{script}" for script in scripts}
    assert sorted(name for name in names if importlib.util.find_spec(name) is None) == []


def test_the_life_of_a_plan_names_what_its_modules_define() -> None:
    page = (DOCS / "life-of-a-plan.md").read_text(encoding="utf-8")
    of_types = re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", page, flags=re.MULTILINE)
    before = re.findall(r"`(\w+)`\s\(`([\w/]+\.py)`\)", page)
    behind = [(name, path) for path, name in re.findall(r"`([\w/]+\.py)`\s\(`(\w+)`\)", page)]
    assert len(of_types) == 5 and len(before) >= 8 and len(behind) >= 5
    wrong = [
        (name, path)
        for name, path in (*of_types, *before, *behind)
        if not re.search(
            rf"^ *(class|def) {name}\b",
            (ROOT / "src" / "hetplan" / path).read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
    ]
    assert wrong == []
