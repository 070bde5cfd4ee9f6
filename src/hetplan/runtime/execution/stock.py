"""Stock torch's engines for plans of stages (`runtime.stock`)."""

from typing import Any

from hetplan.plans.plan import Plan
from hetplan.runtime.execution.stages import StageEngine


class StockEngine(StageEngine):
    """Executes plans of stages on stock torch's engines, which execute fewer of them."""

    def check_chain(self, plan: Plan, chain: Any) -> None:
        """Raise UnsupportedError for a plan that stock torch's engines cannot execute."""
        from hetplan.runtime.stock import check_stock

        check_stock(plan, chain)

    def trained(self, module: Any, plan: Plan, **options: Any) -> Any:
        """The rank's part of a torch module on stock torch's engines."""
        from hetplan.runtime.stock import Stock

        return Stock(module, plan, **options)
