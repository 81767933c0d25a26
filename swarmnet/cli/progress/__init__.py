"""Progress bars, tables and plots of training and fine-tuning."""
