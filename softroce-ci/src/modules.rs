//! Which kernel modules the guest loads, and in which order.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::elf::{self, canonical};
use crate::error::{Context as _, Error};

/// What a guest loads, in this order, and whether it cannot do without. rxe's ICRC needs crc32, which newer kernels have
/// built in under another name; the links and queueing disciplines are for tests that make faults.
const ALWAYS: [(&str, bool); 17] = [
    ("virtio_pci", true),
    ("virtio_net", true),
    ("virtio_rng", false),
    ("virtio_console", true),
    ("9pnet_virtio", true),
    ("9p", true),
    ("overlay", true),
    ("crc32_generic", false),
    ("crc32_pclmul", false),
    ("ib_core", true),
    ("ib_uverbs", true),
    ("rdma_rxe", true),
    ("rdma_ucm", false),
    ("dummy", true),
    ("sch_netem", false),
    ("veth", false),
    ("sch_tbf", false),
];
/// Loaded when the kernel has them and the host has `nft` or `iptables`.
const FIREWALL: [&str; 8] = [
    "nf_tables",
    "nft_compat",
    "ip_tables",
    "iptable_filter",
    "ip6_tables",
    "ip6table_filter",
    "xt_tcpudp",
    "xt_statistic",
];

/// The modules of one kernel.
pub(crate) struct Tree {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

/// A module to load, with its content decompressed.
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) content: Vec<u8>,
}

impl Tree {
    /// Looks through `lib/modules/<release>`.
    pub(crate) fn scan(dir: &Path) -> Result<Self, Error> {
        let mut files = BTreeMap::new();
        let mut todo = vec![dir.to_path_buf()];
        while let Some(dir) = todo.pop() {
            let entries = std::fs::read_dir(&dir).context(|| format!("read {}", dir.display()))?;
            for entry in entries {
                let entry = entry.context(|| format!("read {}", dir.display()))?;
                let path = entry.path();
                let is_dir = entry.file_type().context(|| format!("read {}", path.display()))?.is_dir();
                if is_dir {
                    todo.push(path);
                } else if let Some(name) = module_name(&path) {
                    files.insert(name, path);
                }
            }
        }
        let list = std::fs::read_to_string(dir.join("modules.builtin")).unwrap_or_default();
        let builtin = list.lines().filter_map(|line| module_name(Path::new(line))).collect();
        Ok(Self { files, builtin })
    }

    /// The names of the modules to load, without those that this kernel lacks and a guest can do without.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`] names those that a guest needs and the kernel lacks.
    pub(crate) fn wanted(&self, firewall: bool) -> Result<Vec<&'static str>, Error> {
        let needed = ALWAYS.iter().filter(|(_, needed)| *needed);
        let missing: Vec<&str> = needed.map(|(name, _)| *name).filter(|name| !self.has(name)).collect();
        if !missing.is_empty() {
            return Err(Error::Kernel(format!("it has no module {}", missing.join(", "))));
        }
        let names = ALWAYS.iter().map(|(name, _)| *name);
        let firewall = FIREWALL.iter().copied().filter(|_| firewall);
        Ok(names.chain(firewall).filter(|name| self.has(name)).collect())
    }

    /// Whether the kernel has it, as a module or built in.
    fn has(&self, name: &str) -> bool {
        self.files.contains_key(name) || self.builtin.contains(name)
    }

    /// The modules for `names` with all that they depend on, each after its dependencies; built-in ones are left out.
    pub(crate) fn resolve(&self, names: &[&str]) -> Result<Vec<Module>, Error> {
        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for name in names {
            self.visit(&canonical(name), true, &mut seen, &mut order)?;
        }
        Ok(order)
    }

    fn visit(
        &self,
        name: &str,
        needed: bool,
        seen: &mut BTreeSet<String>,
        order: &mut Vec<Module>,
    ) -> Result<(), Error> {
        if self.builtin.contains(name) || !seen.insert(name.to_owned()) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            let missing = || Err(Error::Kernel(format!("it has no module `{name}`")));
            return if needed { missing() } else { Ok(()) };
        };
        let content = read(path)?;
        let info = elf::modinfo(&content)
            .ok_or_else(|| Error::Kernel(format!("{} is not a kernel module", path.display())))?;
        for name in &info.wants {
            self.visit(name, false, seen, order)?;
        }
        for name in &info.depends {
            self.visit(name, true, seen, order)?;
        }
        order.push(Module { name: name.to_owned(), content });
        Ok(())
    }
}

fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (name, ending) = file.split_once(".ko")?;
    matches!(ending, "" | ".xz" | ".zst" | ".gz").then(|| canonical(name))
}

/// Reads a module, decompressing it with the distribution's tools.
fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let tool = match path.extension().and_then(|ending| ending.to_str()) {
        Some("xz") => &["busybox", "xz"][..],
        Some("zst") => &["zstd", "-q"],
        Some("gz") => &["busybox", "gzip"],
        _ => return std::fs::read(path).context(|| format!("read {}", path.display())),
    };
    let name = format!("{} -dc {}", tool.join(" "), path.display());
    let mut command = Command::new(tool[0]);
    command.args(&tool[1..]).arg("-dc").arg(path).stderr(Stdio::inherit());
    let output = command.output().context(|| format!("run `{name}`"))?;
    if output.status.success() { Ok(output.stdout) } else { Err(Error::Kernel(format!("`{name}` failed"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(modules: &[(&str, &str)], builtin: &str) -> (tempfile::TempDir, Tree) {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("kernel");
        std::fs::create_dir(&kernel).unwrap();
        for (file, info) in modules {
            let info = info.replace(';', "\0") + "\0";
            std::fs::write(kernel.join(file), elf::tests::module(info.as_bytes())).unwrap();
        }
        std::fs::write(dir.path().join("modules.builtin"), builtin).unwrap();
        let tree = Tree::scan(dir.path()).unwrap();
        (dir, tree)
    }

    fn names(modules: &[Module]) -> Vec<&str> {
        modules.iter().map(|module| module.name.as_str()).collect()
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let (_dir, tree) = tree(
            &[
                ("rdma_rxe.ko", "depends=ib_uverbs,ib_core"),
                ("ib_uverbs.ko", "depends=ib_core"),
                ("ib_core.ko", "depends="),
                ("udp-tunnel.ko", "depends="),
            ],
            "",
        );
        assert_eq!(
            names(&tree.resolve(&["rdma_rxe", "ib_core", "udp-tunnel"]).unwrap()),
            ["ib_core", "ib_uverbs", "rdma_rxe", "udp_tunnel"]
        );
    }

    #[test]
    fn built_in_modules_need_no_loading() {
        let (_dir, tree) = tree(
            &[("9pnet_virtio.ko", "depends=virtio,9pnet;softdep=pre: gone")],
            "kernel/virtio/virtio.ko\nkernel/9pnet.ko\n",
        );
        assert_eq!(names(&tree.resolve(&["9pnet_virtio", "virtio"]).unwrap()), ["9pnet_virtio"]);
        assert!(tree.has("virtio") && tree.has("9pnet_virtio") && !tree.has("gone"));
    }

    #[test]
    fn a_missing_module_is_named() {
        let (_dir, tree) = tree(&[("a.ko", "depends=b")], "");
        let Err(error) = tree.resolve(&["a"]) else { panic!("resolved") };
        assert!(error.to_string().contains("`b`"), "{error}");
        let error = tree.wanted(false).unwrap_err().to_string();
        assert!(error.contains("rdma_rxe") && !error.contains("crc32"), "{error}");
    }

    #[test]
    fn module_files_are_told_from_others() {
        assert_eq!(module_name(Path::new("x/crc32-pclmul.ko.zst")).as_deref(), Some("crc32_pclmul"));
        assert_eq!(module_name(Path::new("x/modules.order")), None);
        assert_eq!(module_name(Path::new("x/a.koala")), None);
    }
}
