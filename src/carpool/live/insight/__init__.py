"""What people are told about jobs and GPUs: rows, reasons, forecasts, receipts. Reads the state, never changes it."""
