"""Better plans for hot ones: attempts, proofs, races, and the audit behind them."""
