"""The dashboard: pages that show runs. It only reads run directories, and never imports torch."""
