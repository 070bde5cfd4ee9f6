"""The schema of pipeline templates in a plan file. When devices are lost, `hetplan plan replan` and
`hetplan run --elastic` make the next plan of them."""

from pydantic import Field

from hetplan.schema import Count, Name, PositiveCount, StrictModel


class TemplateStage(StrictModel):
    """One stage of a template: consecutive layers on devices of one node."""

    first: Count  # layers [first, last)
    last: Count
    type: Name  # of the node, as problem `ditto` names it
    devices: PositiveCount  # number of them


class ReadyTemplates(StrictModel):
    """The templates of a plan: pipelines for parts of the cluster (Oobleck, Ditto). The strategy
    `ditto` makes them with the setting `failures`."""

    failures: Count  # number of pipelines that may be lost
    samples: PositiveCount  # samples of a micro-batch
    # [template][stage]
    pipelines: list[list[TemplateStage]] = Field(min_length=1, max_length=100_000)
