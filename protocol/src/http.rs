//! `http/request`: known by name; requests from the executing side are not built yet.
