use super::super::record::RecordsAt;
use super::*;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;

/// A directory to work in, and records beside it.
fn place() -> (tempfile::TempDir, PathBuf, Records) {
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path().canonicalize().unwrap();
    fs::create_dir(top.join("ws")).unwrap();
    fs::DirBuilder::new().mode(0o700).create(top.join("records")).unwrap();
    let records = RecordsAt::new(&top.join("records")).open().unwrap();
    (directory, top.join("ws"), records)
}

fn recorded(workspace: &Path) -> usize {
    fs::read_dir(workspace.with_file_name("records")).unwrap().count()
}

#[test]
fn a_closed_workspace_loses_its_mount_points_too() {
    for mode in [0o555, 0] {
        let (_directory, top, records) = place();
        let path = top.join(".git");
        drop(Point::make(&path, &records).unwrap().unwrap());
        let close = |mode| fs::set_permissions(&top, fs::Permissions::from_mode(mode)).unwrap();
        close(mode);
        remove(&path, &records);
        assert_eq!(fs::metadata(&top).unwrap().mode() & 0o7777, mode);
        close(0o755);
        assert!(!path.exists() && recorded(&top) == 0, "{mode:o}");
    }
}

#[test]
fn a_default_acl_neither_stops_a_mount_point_nor_keeps_it() {
    let (_directory, top, records) = place();
    // user::---, group::---, other::--- (acl(5), `posix_acl_xattr.h`).
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for tag in [0x01_u16, 0x04, 0x20] {
        acl.extend([&tag.to_le_bytes()[..], &0_u16.to_le_bytes(), &u32::MAX.to_le_bytes()].concat());
    }
    match rustix::fs::setxattr(&top, "system.posix_acl_default", &acl, rustix::fs::XattrFlags::empty()) {
        // This file system has no ACLs.
        Err(Errno::OPNOTSUPP) => return,
        set => set.unwrap(),
    }
    // The control: the ACL takes the mode of a directory that is made there.
    fs::create_dir(top.join("control")).unwrap();
    assert_eq!(fs::metadata(top.join("control")).unwrap().mode() & 0o777, 0);
    // Nothing can look into it to remove it later.
    fs::remove_dir(top.join("control")).unwrap();
    let path = top.join(".git");
    let point = Point::make(&path, &records).unwrap().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, MODE);
    drop(point);
    remove(&path, &records);
    assert!(!path.exists() && recorded(&top) == 0);
}

#[test]
fn the_last_user_removes_it() {
    let (_directory, top, records) = place();
    let path = top.join(".git");
    let make = || Point::make(&path, &records).unwrap().unwrap();
    let (first, second) = (make(), make());
    remove(&path, &records);
    assert!(path.is_dir(), "in use twice");
    drop(first);
    remove(&path, &records);
    assert!(path.is_dir(), "in use");
    drop(second);
    remove(&path, &records);
    assert!(!path.exists());
    assert_eq!(recorded(&top), 0);
}

#[test]
fn one_that_is_removed_while_it_is_looked_at_is_made_again() {
    let (_directory, top, records) = place();
    let path = top.join(".git");
    let point = Point::make(&path, &records).unwrap().unwrap();
    assert!(is_ours(point.directory(), &path, Some(&records)) && may_be_one(point.directory(), &path));
    fs::write(path.join("file"), "").unwrap();
    assert!(!is_ours(point.directory(), &path, Some(&records)), "control: somebody uses it as a directory");
    fs::remove_file(path.join("file")).unwrap();
    let place = open_directory(&path).unwrap();
    drop(point);
    remove(&path, &records);
    assert!(may_be_one(&place, &path) && !path.exists(), "its last user ended between two looks");
}

#[test]
fn what_is_not_ours_or_not_empty_stays() {
    let (_directory, top, records) = place();
    for mode in [0o755, MODE] {
        let plain = top.join(format!("{mode:o}"));
        fs::create_dir(&plain).unwrap();
        fs::set_permissions(&plain, fs::Permissions::from_mode(mode)).unwrap();
        remove(&plain, &records);
        assert!(plain.is_dir());
    }
    drop(Point::make(&top.join("used"), &records).unwrap());
    fs::write(top.join("used/file"), "").unwrap();
    remove(&top.join("used"), &records);
    assert!(top.join("used/file").exists());
    assert_eq!(recorded(&top), 0, "in use as a directory, it is nobody's mount point any more");
}

#[test]
fn a_directory_of_the_same_mode_is_shared_and_stays() {
    let (_directory, top, records) = place();
    let path = top.join(".git");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(MODE)).unwrap();
    let before = fs::metadata(&path).unwrap();
    let point = Point::make(&path, &records).unwrap().unwrap();
    // It has a lock, so that the one whose it is leaves it.
    let other = open_directory(&path).unwrap();
    assert_eq!(flock(&other, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK));
    drop(point);
    remove(&path, &records);
    assert_eq!(fs::metadata(&path).unwrap().ino(), before.ino());
}

#[test]
fn a_stranger_with_the_exclusive_lock_only_puts_off_the_removal() {
    let (_directory, top, records) = place();
    let path = top.join(".git");
    drop(Point::make(&path, &records).unwrap().unwrap());
    let stranger = open_directory(&path).unwrap();
    flock(&stranger, FlockOperation::NonBlockingLockExclusive).unwrap();
    drop(Point::make(&path, &records).unwrap().expect("it can be used all the same"));
    remove(&path, &records);
    assert!(path.is_dir() && recorded(&top) == 1, "left for the next use, or the next server");
    drop(stranger);
    remove_left(&records);
    assert!(!path.exists() && recorded(&top) == 0);
}

#[test]
fn one_that_was_left_behind_is_taken_over() {
    let (_directory, top, records) = place();
    let path = top.join(".codex");
    drop(Point::make(&path, &records).unwrap());
    assert!(path.is_dir(), "left behind");
    drop(Point::make(&path, &records).unwrap().unwrap());
    remove(&path, &records);
    assert!(!path.exists());
}

#[test]
fn what_was_replaced_stays_and_its_record_goes() {
    let (_directory, top, records) = place();
    let path = top.join(".git");
    drop(Point::make(&path, &records).unwrap().unwrap());
    // Renamed, so that the inode is not used again.
    fs::rename(&path, top.join("moved")).unwrap();
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(MODE)).unwrap();
    remove(&path, &records);
    assert!(path.is_dir() && top.join("moved").is_dir());
    assert_eq!(recorded(&top), 0);
}

#[test]
fn a_crash_between_the_intent_and_the_record_leaves_nothing() {
    let (_directory, top, records) = place();
    let (made, older) = (top.join("made"), top.join("older"));
    fs::create_dir(&older).unwrap();
    fs::set_permissions(&older, fs::Permissions::from_mode(MODE)).unwrap();
    // Until the clock that stamps files has gone on.
    let born = Mark::of(&open_directory(&older).unwrap()).unwrap().born.unwrap();
    let intend = |path: &Path| records.intend(path).unwrap();
    let mut intent = intend(&older);
    while intent.time <= born {
        records.drop_intent(&intent);
        intent = intend(&older);
    }
    intend(&made);
    fs::create_dir(&made).unwrap();
    remove_left(&records);
    assert!(!made.exists(), "made after the intent");
    assert!(older.is_dir(), "it was there before the intent");
}

#[test]
fn what_is_moved_there_meanwhile_gets_no_record() {
    let (_directory, top, records) = place();
    let (path, own) = (top.join(".git"), top.join("own"));
    fs::create_dir(&own).unwrap();
    let born = Mark::of(&open_directory(&own).unwrap()).unwrap().born.unwrap();
    let mut intent = records.intend(&path).unwrap();
    while intent.time <= born {
        records.drop_intent(&intent);
        intent = records.intend(&path).unwrap();
    }
    fs::rename(&own, &path).unwrap();
    let directory = open_directory(&path).unwrap();
    assert!(!intent.made(&directory, Mark::of(&directory).unwrap()).unwrap());
    fs::remove_dir(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let directory = open_directory(&path).unwrap();
    assert!(intent.made(&directory, Mark::of(&directory).unwrap()).unwrap(), "control: made after the intent");
}
