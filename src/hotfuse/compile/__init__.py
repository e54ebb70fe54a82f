"""Work beside inference: worker processes and what they are asked to do."""
