// Page of the service's status.

import { keyForm } from "./key.js";
import { watch } from "./service.js";

const refresh = watch();
keyForm(refresh);
