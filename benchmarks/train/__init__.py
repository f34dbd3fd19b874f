"""The same model, data and batch trained by wanma and by its peers."""
