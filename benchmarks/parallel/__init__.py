"""Each axis of a plan beside the plain-torch way of doing the same."""
