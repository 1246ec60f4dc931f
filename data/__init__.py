"""What is logged: prompts and references in, traces (Parquet) out and in again."""
