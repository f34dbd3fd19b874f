"""Loss of trainings with approximate gradient exchanges, beside uncompressed gradients."""
