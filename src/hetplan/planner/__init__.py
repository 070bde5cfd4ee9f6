"""The planner: one workload posed as each paper's problem, all solved, and their plans ranked."""
