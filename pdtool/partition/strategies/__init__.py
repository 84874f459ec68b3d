"""Plans of every strategy that pdtool.schedule.strategies lists, each the best of its kind, and rivals of a plan."""
