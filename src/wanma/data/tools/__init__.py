"""Tools on stored data: inspection, verification, statistics, conversion, and the mixture that was seen."""
