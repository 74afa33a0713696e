"""What users see of jobs and GPUs: rows, reasons, forecasts, receipts. It reads the state and never changes it."""
