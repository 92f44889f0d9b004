"""What this process may use: reads /sys, /proc, cgroups and NVML; decides nothing."""
