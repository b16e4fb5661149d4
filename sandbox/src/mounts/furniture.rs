//! The parts that every view has, independent of its policy: `/dev`, `/proc`, and empty files and directories as covers.

use super::MountError;
use super::device::{Devices, Processes};
use super::kernel;
use super::mask::Masks;
use super::tree::Tree;
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

/// The parts of a view that do not depend on its policy. They stay detached until the policy is known.
#[derive(Debug)]
pub(super) struct Furniture {
    masks: Masks,
    devices: Devices,
    processes: Processes,
    /// The parts are complete. Before Linux 6.15 only an attached mount can be cloned or mounted on.
    is_whole: bool,
}

/// The result of [`Furniture::place`].
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) masks: Masks,
    /// `/dev`, still to be locked.
    pub(super) devices: Tree,
    /// Whether `/proc` shows only the processes of this namespace.
    pub(super) own_proc: bool,
}

impl Furniture {
    /// Makes the parts with the machine's devices, as this process has them mounted.
    pub(super) fn make() -> Result<Self, MountError> {
        let mut furniture =
            Self { masks: Masks::new()?, devices: Devices::take()?, processes: Processes::take()?, is_whole: false };
        match furniture.complete() {
            Err(error) if error.errno == Errno::INVAL.raw_os_error() => {}
            other => other?,
        }
        Ok(furniture)
    }

    /// The descriptors of the detached mounts.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let processes = self.processes.tree().map(Tree::top);
        self.devices.mounts().chain(processes).chain([self.masks.top()]).map(|mount| mount.as_raw_fd())
    }

    /// Covers the file systems of the kernel in this process's copy of the machine's mounts, and returns those that are in locked
    /// directories. `None` if that is not possible before anything is attached.
    pub(super) fn cover_kernel_mounts(&self) -> Result<Option<Vec<PathBuf>>, MountError> {
        // Mounts in `/proc` are hidden by the view's `/proc`, and no directory there can be renamed.
        self.is_whole.then(|| kernel::cover_all(&self.masks, |path| path.starts_with("/proc"))).transpose()
    }

    fn complete(&mut self) -> Result<(), MountError> {
        if !self.is_whole {
            self.devices.fill()?;
            if let Some(proc) = self.processes.tree() {
                kernel::mask_processes(proc.top(), &self.masks)?;
            }
            self.is_whole = true;
        }
        Ok(())
    }

    /// Attaches the parts. `open` opens a directory of the ground as it is at that moment; `console` is [`Devices::console`].
    pub(super) fn place(
        mut self,
        open: impl Fn(&str) -> Result<OwnedFd, MountError>,
        console: Option<Tree>,
    ) -> Result<Placed, MountError> {
        if !self.is_whole {
            // On `/dev`, where the devices will cover them.
            self.masks.attach(open("/dev")?.as_fd())?;
        }
        self.devices.attach(open("/dev")?.as_fd())?;
        let own_proc = self.processes.attach(|| open("/proc"))?;
        self.complete()?;
        if let Some(console) = console {
            self.devices.add_console(&console)?;
        }
        Ok(Placed { masks: self.masks, devices: self.devices.into_directory(), own_proc })
    }
}
