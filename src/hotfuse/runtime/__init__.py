"""The inference engine: plans, guards, weight watching, the slot, and the policy around them."""
