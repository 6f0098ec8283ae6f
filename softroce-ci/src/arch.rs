//! What differs between processors.

use crate::error::Error;

/// One processor architecture, as QEMU, the kernel and Debian name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arch {
    /// QEMU's system emulator.
    pub(crate) qemu: &'static str,
    /// Debian's package with it.
    pub(crate) qemu_package: &'static str,
    /// Machine type.
    pub(crate) machine: &'static str,
    /// The serial console's name in the guest.
    pub(crate) console: &'static str,
    /// Word of the kernel's command line for a clock that is read without leaving user space.
    pub(crate) clock: &'static str,
    /// Package that depends on the newest kernel image: Debian's.
    pub(crate) debian_kernel: &'static str,
}

const X86_64: Arch = Arch {
    qemu: "qemu-system-x86_64",
    qemu_package: "qemu-system-x86",
    machine: "q35",
    console: "ttyS0",
    // Under TCG the kernel distrusts the TSC and takes the HPET: 4.3 µs a reading instead of 0.08. QEMU derives the TSC of
    // all CPUs from one clock.
    clock: "tsc=reliable",
    debian_kernel: "linux-image-amd64",
};

/// The kernel is a plain `Image` or a gzipped one; QEMU boots both.
const AARCH64: Arch = Arch {
    qemu: "qemu-system-aarch64",
    qemu_package: "qemu-system-arm",
    machine: "virt",
    console: "ttyAMA0",
    clock: "",
    debian_kernel: "linux-image-arm64",
};

impl Arch {
    /// The architecture that this program was built for.
    pub(crate) fn host() -> Result<Self, Error> {
        Self::named(std::env::consts::ARCH)
    }

    fn named(name: &str) -> Result<Self, Error> {
        match name {
            "x86_64" => Ok(X86_64),
            "aarch64" => Ok(AARCH64),
            other => Err(Error::Architecture(other.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_architecture_is_named() {
        let said = Arch::named("riscv64").unwrap_err().to_string();
        assert!(said.contains("riscv64") && said.contains("--via"), "{said}");
    }
}
