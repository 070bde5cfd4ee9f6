"""Pipeline templates in a plan file, from which a plan after a loss is made."""

from pydantic import Field

from hetplan.schema import Count, Name, PositiveCount, StrictModel


class TemplateStage(StrictModel):
    """A stage of a template: layers [first, last) on `devices` devices of one node of a kind."""

    first: Count
    last: Count
    type: Name
    devices: PositiveCount


class ReadyTemplates(StrictModel):
    """Pipelines that stand ready for parts of the cluster (Oobleck, Ditto), from which a plan after
    a loss is made. failures: pipelines that may be lost; samples: of a micro-batch; pipelines:
    stages of each, on kinds of nodes."""

    failures: Count
    samples: PositiveCount
    pipelines: list[list[TemplateStage]] = Field(min_length=1, max_length=100_000)
