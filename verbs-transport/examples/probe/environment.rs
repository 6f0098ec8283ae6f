//! The machine: kernel, tick, user-space library, limits.

use std::{fs, thread, time::Duration};

use crate::facts::Facts;

pub(crate) fn read(facts: &mut Facts) {
    let kernel = read_line("/proc/sys/kernel/osrelease");
    facts.add("machine", "kernel", kernel.clone().unwrap_or_else(unknown));
    facts.add(
        "machine",
        "kernel_hz",
        kernel.and_then(|release| configured_hz(&release)).or_else(measured_hz).unwrap_or_else(unknown),
    );
    facts.add("machine", "rdma_core", rdma_core().unwrap_or_else(unknown));
    facts.add("machine", "memlock", memlock().unwrap_or_else(unknown));
    facts.add("machine", "cpus", std::thread::available_parallelism().map_or(0, usize::from));
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn read_line(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn configured_hz(release: &str) -> Option<String> {
    let config = fs::read_to_string(format!("/boot/config-{release}")).ok()?;
    config.lines().find_map(|line| line.strip_prefix("CONFIG_HZ=")).map(str::to_owned)
}

/// Ticks against nanoseconds, from the kernel's own list of timers, which root may read.
fn measured_hz() -> Option<String> {
    let sample = || {
        let list = fs::read_to_string("/proc/timer_list").ok()?;
        let number = |text: &str| text.split_ascii_whitespace().find_map(|word| word.parse::<u64>().ok());
        let now = list.lines().find_map(|line| number(line.strip_prefix("now at")?))?;
        let ticks = list.lines().find_map(|line| number(line.trim().strip_prefix("jiffies:")?))?;
        Some((now, ticks))
    };
    let (start, first) = sample()?;
    thread::sleep(Duration::from_secs(1));
    let (end, last) = sample()?;
    let per_second = (last.checked_sub(first)? * 1_000_000_000).checked_div(end.checked_sub(start)?)?;
    // A tick more or less is noise: kernels are built with one of these.
    let nearest = [100, 250, 300, 1000].into_iter().min_by_key(|hz: &u64| hz.abs_diff(per_second))?;
    Some(format!("{nearest} (measured)"))
}

/// From the name of the mapped library, which ends in the package's version: `libibverbs.so.1.14.44.0` is 44.0.
fn rdma_core() -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let path =
        maps.lines().filter_map(|line| line.split_ascii_whitespace().nth(5)).find(|p| p.contains("libibverbs.so"))?;
    let real = fs::canonicalize(path).ok()?;
    let name = real.file_name()?.to_str()?.to_owned();
    let version: Vec<&str> = name.split('.').collect();
    match version[..] {
        [.., _, major, minor] if version.len() >= 6 => Some(format!("{major}.{minor}")),
        _ => Some(name),
    }
}

fn memlock() -> Option<String> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find(|line| line.starts_with("Max locked memory"))?;
    line.split_ascii_whitespace().nth(3).map(|soft| match soft {
        "unlimited" => soft.to_owned(),
        bytes => format!("{bytes} bytes"),
    })
}
