//! The three ways to a device: one that is there, a kernel module, a VM.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::error::Error;
use crate::setup::Privilege;

/// How the device comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Via {
    /// A device that this host has.
    Device,
    /// The kernel's `rdma_rxe` on a dummy link, made for the time of the command.
    Module,
    /// A virtual machine.
    Vm,
}

impl Via {
    /// As in `SOFTROCE_VIA`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Module => "module",
            Self::Vm => "vm",
        }
    }
}

const DUMMY: &str = "softroce0";
const RXE: &str = "softroce-rxe0";

/// A device of this host; one that we made goes with it.
pub(crate) struct Local {
    via: Via,
    device: String,
    made_with: Option<Privilege>,
}

impl Local {
    pub(crate) fn via(&self) -> Via {
        self.via
    }

    pub(crate) fn device(&self) -> &str {
        &self.device
    }

    /// No device at all, for commands that need none.
    pub(crate) fn none() -> Self {
        Self { via: Via::Device, device: String::new(), made_with: None }
    }

    /// The first RDMA device with an active port and a device node that we may open.
    pub(crate) fn find() -> Option<Self> {
        let device = usable_device(Path::new("/sys/class"), Path::new("/dev/infiniband"))?;
        Some(Self { via: Via::Device, device, made_with: None })
    }

    /// Makes a device on a dummy link, as root or through sudo.
    pub(crate) fn make(privilege: Privilege) -> Result<Self, Error> {
        let failed = |why: String| Error::Via { way: "module", why };
        let local = Self { via: Via::Module, device: RXE.to_owned(), made_with: Some(privilege) };
        let _left_by_a_killed_run = remove(privilege);
        for step in [
            "modprobe dummy numdummies=0",
            "modprobe ib_uverbs",
            "modprobe rdma_ucm",
            &format!("ip link add {DUMMY} type dummy"),
            &format!("ip link set {DUMMY} mtu 4200 up"),
            &format!("ip addr add 10.99.0.1/24 dev {DUMMY}"),
            &format!("ip addr add 10.99.0.2/24 dev {DUMMY}"),
            &format!("rdma link add {RXE} type rxe netdev {DUMMY}"),
        ] {
            run(privilege, step).map_err(failed)?; // dropping `local` takes back what was done
        }
        for _ in 0..100 {
            if Self::find().is_some() {
                return Ok(local);
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        Err(failed(format!("{RXE} was made, but /dev/infiniband has no node for it that can be opened")))
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if let Some(privilege) = self.made_with {
            let _gone = remove(privilege);
        }
    }
}

fn remove(privilege: Privilege) -> Result<(), String> {
    let link = run(privilege, &format!("rdma link delete {RXE}"));
    run(privilege, &format!("ip link delete {DUMMY}")).and(link)
}

/// Whether the kernel can load `rdma_rxe`, by loading it.
pub(crate) fn module_loads(privilege: Privilege) -> Result<(), String> {
    if privilege == Privilege::None {
        return Err("not root, and no sudo without a password".to_owned());
    }
    run(privilege, "modprobe rdma_rxe")
}

fn run(privilege: Privilege, line: &str) -> Result<(), String> {
    let mut words = line.split(' ');
    let mut command = privilege.command(words.next().unwrap_or_default());
    command.args(words).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("`{line}`: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("`{line}` failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

fn usable_device(class: &Path, nodes: &Path) -> Option<String> {
    let names = |dir: &Path| {
        let mut names: Vec<String> = std::fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    };
    let opens = |node: &str| std::fs::File::options().read(true).write(true).open(nodes.join(node)).is_ok();
    names(&class.join("infiniband_verbs")).into_iter().find_map(|node| {
        let name = std::fs::read_to_string(class.join("infiniband_verbs").join(&node).join("ibdev")).ok()?;
        let ports = class.join("infiniband").join(name.trim()).join("ports");
        let active = names(&ports).iter().any(|port| {
            std::fs::read_to_string(ports.join(port).join("state")).is_ok_and(|state| state.contains("ACTIVE"))
        });
        (active && opens(&node)).then(|| name.trim().to_owned())
    })
}

/// Lifts the limit of locked memory for us and what we start, where we may.
pub(crate) fn lift_memlock(privilege: Privilege) {
    let mut command: Command = privilege.command("prlimit");
    command.args(["--memlock=unlimited:unlimited", "--pid", &std::process::id().to_string()]);
    let _stays_as_it_is = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_device_with_an_active_port_and_a_node_serves() {
        let dir = tempfile::tempdir().unwrap();
        let (class, nodes) = (dir.path().join("class"), dir.path().join("dev"));
        let add = |node: &str, name: &str, state: &str, has_node: bool| {
            let verbs = class.join("infiniband_verbs").join(node);
            let port = class.join("infiniband").join(name).join("ports/1");
            for made in [&verbs, &port, &nodes] {
                std::fs::create_dir_all(made).unwrap();
            }
            std::fs::write(verbs.join("ibdev"), format!("{name}\n")).unwrap();
            std::fs::write(port.join("state"), state).unwrap();
            if has_node {
                std::fs::write(nodes.join(node), "").unwrap();
            }
        };
        assert_eq!(usable_device(&class, &nodes), None);
        add("uverbs0", "mlx5_0", "1: DOWN\n", true);
        add("uverbs1", "mlx5_1", "4: ACTIVE\n", false);
        assert_eq!(usable_device(&class, &nodes), None);
        add("uverbs2", "rxe0", "4: ACTIVE\n", true);
        assert_eq!(usable_device(&class, &nodes).as_deref(), Some("rxe0"));
    }
}
