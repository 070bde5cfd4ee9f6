"""Local ranks of a plan: forked, watched over, and started again without a lost node."""
