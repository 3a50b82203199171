"""Search over cluster designs: which machines serve a workload within its SLOs."""
