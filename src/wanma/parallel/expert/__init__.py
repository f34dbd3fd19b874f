"""Expert parallelism: experts split over `ep` and `tp`, and the dispatch of tokens to them."""
