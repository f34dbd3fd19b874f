"""Commands on stored data: tables and text for a terminal, and the mixture of a run."""
