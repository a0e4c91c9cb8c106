-- Roles for a server of your own, MySQL 8 or MariaDB 10.6 and later, with the database's name in the place of `tidings`. As an administrator:
-- make the database (CREATE DATABASE tidings CHARACTER SET utf8mb4 COLLATE utf8mb4_bin), run this file (its last statement needs the tables: it fails
-- the first time), make an account for each role that you use,
--
--   CREATE USER 'tidings'@'10.0.0.%' IDENTIFIED BY '…';
--   GRANT tidings_runtime TO 'tidings'@'10.0.0.%';               -- and another with tidings_migrator, …
--   SET DEFAULT ROLE tidings_runtime FOR 'tidings'@'10.0.0.%';   -- MariaDB
--   SET DEFAULT ROLE tidings_runtime TO 'tidings'@'10.0.0.%';    -- MySQL
--
-- start Tidings with both as mysql.dsn and mysql.migrator_dsn, which makes the tables, and run this file again.

-- What the program does all day (mysql.dsn). It cannot make, change or drop a table.
CREATE ROLE IF NOT EXISTS tidings_runtime;
GRANT SELECT, INSERT, UPDATE, DELETE ON tidings.* TO tidings_runtime;

-- What makes and changes tables: migrations, days of the history, the ring of delay tables, restored archives (mysql.migrator_dsn).
CREATE ROLE IF NOT EXISTS tidings_migrator;
GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX, CREATE VIEW, SHOW VIEW ON tidings.* TO tidings_migrator;

-- Who looks: people and reports.
CREATE ROLE IF NOT EXISTS tidings_reader;
GRANT SELECT, SHOW VIEW ON tidings.* TO tidings_reader;

-- Services that hand in requests by SQL: only the columns that are theirs to fill in, and nothing to read.
CREATE ROLE IF NOT EXISTS tidings_intake;
GRANT INSERT (source_id, request_id, template_id, channels, priority, category, receiver, params, content, send_at, expire_time) ON tidings.t_msg_submit TO tidings_intake;
