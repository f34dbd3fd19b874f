"""Native code: lookup of a C++ compiler, compilation and cache of wanma's C++ libraries."""
