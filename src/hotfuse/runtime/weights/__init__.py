"""The model's weights while it is served: noticing changes, and giving back what is held twice."""
