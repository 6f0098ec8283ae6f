//! Makes the Soft-RoCE device in a guest.

use std::io;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::guest::GuestConfig;

/// The device's name.
pub(crate) const DEVICE: &str = "rxe0";
/// Gives an active MTU of 4096; 1500 would give 1024.
const MTU_BYTES: &str = "4200";
const PORT_PATIENCE: Duration = Duration::from_secs(10);

/// Address of a host of a pair.
pub(crate) fn pair_address(host: u8) -> String {
    format!("10.99.1.{host}")
}

/// One guest: a dummy link with two addresses, so that one device serves as two "hosts". Two guests: the cable.
pub(crate) fn make(config: &GuestConfig) -> io::Result<String> {
    ip(&["link", "set", "lo", "up"])?;
    // The addresses are ours alone: without duplicate address detection they serve at once.
    for setting in ["accept_dad", "dad_transmits"] {
        for scope in ["all", "default"] {
            drop(std::fs::write(format!("/proc/sys/net/ipv6/conf/{scope}/{setting}"), "0"));
        }
    }
    let (link, addresses) = if config.hosts == 1 {
        if !Path::new("/sys/class/net/dummy0").exists() {
            ip(&["link", "add", "dummy0", "type", "dummy"])?;
        }
        ("dummy0", vec!["10.99.0.1/24".to_owned(), "10.99.0.2/24".to_owned()])
    } else {
        ("eth0", vec![format!("{}/24", pair_address(config.host))])
    };
    ip(&["link", "set", link, "mtu", MTU_BYTES, "up"])?;
    for address in addresses {
        ip(&["addr", "add", &address, "dev", link])?;
    }
    tool("rdma", &["link", "add", DEVICE, "type", "rxe", "netdev", link])?;
    wait_for_port()?;
    Ok(DEVICE.to_owned())
}

fn ip(args: &[&str]) -> io::Result<()> {
    tool("ip", args)
}

fn tool(name: &str, args: &[&str]) -> io::Result<()> {
    let path = "/usr/sbin:/usr/bin:/sbin:/bin";
    let output = Command::new(name).args(args).env("PATH", path).output();
    let output = output.map_err(|error| io::Error::other(format!("{name} (package iproute2): {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("`{name} {}` failed: {}", args.join(" "), said.trim())))
}

fn wait_for_port() -> io::Result<()> {
    let state = format!("/sys/class/infiniband/{DEVICE}/ports/1/state");
    let start = Instant::now();
    loop {
        let now = std::fs::read_to_string(&state).unwrap_or_default();
        if now.contains("ACTIVE") {
            return Ok(());
        }
        if start.elapsed() > PORT_PATIENCE {
            return Err(io::Error::other(format!("the port of {DEVICE} is not active but `{}`", now.trim())));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
