"""The peers' scripts: plain torch, nothing of wanma."""
