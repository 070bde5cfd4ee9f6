"""All operators by name."""

from hetplan.errors import look_up
from hetplan.programs.operators.attention import ATTENTION
from hetplan.programs.operators.entrywise import ENTRYWISE
from hetplan.programs.operators.lookups import LOOKUPS
from hetplan.programs.operators.moves import MOVES
from hetplan.programs.operators.norms import NORMS
from hetplan.programs.operators.operator import Operator
from hetplan.programs.operators.products import PRODUCTS
from hetplan.programs.operators.routing import ROUTING

OPERATORS: dict[str, Operator] = {
    **ENTRYWISE,
    **NORMS,
    **PRODUCTS,
    **ATTENTION,
    **ROUTING,
    **LOOKUPS,
    **MOVES,
}


def operator(kind: str) -> Operator:
    """The operator of that kind; raises InputError listing the known ones."""
    return look_up("unknown operator", kind, OPERATORS)
