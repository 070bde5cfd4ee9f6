"""The schema of pipeline templates in a plan file. When devices are lost, `hetplan plan replan` and
`hetplan run --elastic` make the next plan of them."""

from pydantic import Field

from hetplan.schema import Count, Name, PositiveCount, StrictModel


class TemplateStage(StrictModel):
    """One stage of a template: consecutive layers on devices of one node."""

    first: Count
    """Layers [first, last)."""
    last: Count
    type: Name
    """Type of the node, as problem `ditto` names it."""
    devices: PositiveCount
    """Number of them."""


class ReadyTemplates(StrictModel):
    """The templates of a plan: pipelines for parts of the cluster (Oobleck, Ditto). The strategy
    `ditto` makes them with the setting `failures`."""

    failures: Count
    """Number of pipelines that may be lost."""
    samples: PositiveCount
    """Samples of a micro-batch."""
    pipelines: list[list[TemplateStage]] = Field(min_length=1, max_length=100_000)
    """[template][stage]."""
