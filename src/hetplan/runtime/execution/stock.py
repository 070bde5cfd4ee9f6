"""Stock torch's engines for the plans of stages that they can say (`runtime.stock`)."""

from typing import Any

from hetplan.plans.plan import Plan
from hetplan.runtime.execution.stages import StageEngine


class StockEngine(StageEngine):
    """Executes plans of stages on torch's own engines, which cover fewer of them."""

    def check_chain(self, plan: Plan, chain: Any) -> None:
        """Raise UnsupportedError for a plan that torch's engines cannot say."""
        from hetplan.runtime.stock import check_stock

        check_stock(plan, chain)

    def trained(self, module: Any, plan: Plan, **options: Any) -> Any:
        """The rank's layers on torch's engines."""
        from hetplan.runtime.stock import Stock

        return Stock(module, plan, **options)
